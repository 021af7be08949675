// Scales and offsets of a panel's groups as float32: included by linear_tiles.inc.h. They are decoded
// once for all rows, some groups at a time, so that the tiles know one form of them.
#pragma once

namespace quire {
namespace {

constexpr int64_t kFactorGroups = 32;  // whole blocks of nested factors

// [groups, kPanel] of each.
struct Factors {
    alignas(64) float scales[kFactorGroups * kPanel];
    alignas(64) float offsets[kFactorGroups * kPanel];
};

QUIRE_INLINE void widen_halves(float* out, const uint8_t* at) {
    unrolled<Isa::kVectors>(QUIRE_EACH(v) {
        Isa::store(out + v * Isa::kLanes, Isa::load_halves(at + v * Isa::kLanes * 2));
    });
}

QUIRE_INLINE void widen_bfloat16(float* out, const uint8_t* at) {
    unrolled<Isa::kVectors>(QUIRE_EACH(v) {
        Isa::store(out + v * Isa::kLanes, Isa::widen_bfloat16(at + v * Isa::kLanes * 2));
    });
}

// Half of 2^(e8m0 - 127), since numbers are doubled: exact also where that is subnormal.
QUIRE_INLINE float half_power(uint8_t exponent) {
    const int32_t normal = (exponent - 1) << 23, tiny = 0x00200000 << (exponent & 1);
    return float_of(exponent > 1 ? normal : tiny);
}

// out = the integers times what they are nested in. T: int8_t or uint8_t.
template <class T>
QUIRE_INLINE void nested(float* out, const uint8_t* at, const float* outer, float sign) {
    for (int64_t i = 0; i < kPanel; ++i) {
        out[i] = sign * outer[i] * static_cast<float>(static_cast<T>(at[i]));
    }
}

QUIRE_INLINE void decode_scales(float* out, const FormatParts& parts, const uint8_t* at, const float* outer) {
    switch (parts.scales) {
        case Scales::kBfloat16: return widen_bfloat16(out, at);
        case Scales::kFloat16: return widen_halves(out, at);
        case Scales::kPower:
            for (int64_t i = 0; i < kPanel; ++i) out[i] = half_power(at[i]);
            return;
        case Scales::kNested:
            return parts.signed_scales ? nested<int8_t>(out, at, outer, 1.0f)
                                       : nested<uint8_t>(out, at, outer, 1.0f);
        default: std::memcpy(out, at, kPanel * 4);
    }
    if (parts.values != Values::kFloat8) return;
    for (int64_t i = 0; i < kPanel; ++i) out[i] *= kFloat8Factor;
}

QUIRE_INLINE void decode_offsets(float* out, const FormatParts& parts, const uint8_t* at, const float* scales,
                    const float* outer) {
    switch (parts.offsets) {
        case Offsets::kNone: return;
        case Offsets::kMinima: return widen_halves(out, at);
        case Offsets::kNested: return nested<uint8_t>(out, at, outer, -1.0f);
        case Offsets::kZeros:
            if (parts.scales == Scales::kFloat32) {
                std::memcpy(out, at, kPanel * 4);
            } else {
                widen_bfloat16(out, at);
            }
            for (int64_t i = 0; i < kPanel; ++i) out[i] = -(scales[i] * out[i]);
    }
}

// Of `count` groups from `first` on, which begins a block.
void decode_factors(Factors& factors, const PackedWeight& weight, const PanelLayout& layout,
                    const uint8_t* panel, int64_t first, int64_t count) {
    const FormatParts& parts = weight.parts();
    alignas(64) float outer[2][kPanel];  // of the block: scales', offsets'
    const uint8_t* at = panel + layout.block(first);
    for (int64_t i = 0; i < count;) {
        if (parts.scales == Scales::kNested) {
            widen_halves(outer[0], at);
            if (parts.offsets == Offsets::kNested) widen_halves(outer[1], at + kPanel * 2);
        }
        at += layout.header_bytes;
        for (int64_t j = 0; j < layout.block_groups; ++j, ++i) {
            float* scales = factors.scales + i * kPanel;
            decode_scales(scales, parts, at, outer[0]);
            at += layout.scale_bytes;
            decode_offsets(factors.offsets + i * kPanel, parts, at, scales, outer[1]);
            at += layout.offset_bytes;
        }
    }
}

}  // namespace
}  // namespace quire
