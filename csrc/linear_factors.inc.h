// Scales and offsets of the sums of a panel's groups: included by linear_tiles.inc.h.
#pragma once

namespace quire {
namespace {

// 2^(e8m0 - 127) / 2, since numbers are doubled: exact also where that is subnormal.
QUIRE_INLINE typename Isa::F half_power(typename Isa::I exponents) {
    const typename Isa::I normal = Isa::template shift_left<23>(exponents - Isa::all(1));
    const typename Isa::I tiny = Isa::template shift_left<21>(exponents + Isa::all(1));
    const typename Isa::I is_tiny = Isa::template shift_right<31>(exponents - Isa::all(2));
    return Isa::as_floats((tiny & is_tiny) | (normal & ~is_tiny));
}

// The factors of vectors of outputs. `at` points to the vector's factors; `outer` holds the factors
// that they are nested in.
template <WeightFormat kFormat>
struct Factors {
    static constexpr FormatParts kParts = parts_of(kFormat);
    static constexpr bool kHasOffsets = kParts.offsets != Offsets::kNone;
    static constexpr bool kAreNested = kParts.scales == Scales::kNested;
    static constexpr int64_t kHeaders = !kAreNested ? 0 : kParts.offsets == Offsets::kNested ? 2 : 1;
    static constexpr int64_t kScaleBytes = bytes_of(kParts.scales);
    static constexpr int64_t kOffsetBytes = bytes_of(kParts.offsets, kParts.scales);
    static constexpr int64_t kGroupBytes = kPanel * (kScaleBytes + kOffsetBytes);
    static constexpr int64_t kHeaderBytes = kPanel * 2 * kHeaders;

    static QUIRE_INLINE typename Isa::F scales(const uint8_t* at, typename Isa::F outer) {
        if constexpr (kParts.scales == Scales::kBfloat16) return Isa::widen_bfloat16(at);
        if constexpr (kParts.scales == Scales::kFloat16) return Isa::load_halves(at);
        if constexpr (kParts.scales == Scales::kWithMultiples) return Isa::high_halves(Isa::load_words(at));
        if constexpr (kParts.scales == Scales::kPower) return half_power(Isa::load_bytes(at));
        if constexpr (kAreNested) {
            typename Isa::I integers = Isa::load_bytes(at);
            if constexpr (kParts.signed_scales) {
                integers = (integers ^ Isa::all(128)) - Isa::all(128);
            }
            return Isa::times(outer, Isa::to_float(integers));
        }
        const typename Isa::F plain = Isa::load(at);
        if constexpr (kParts.values != Values::kFloat8) return plain;
        return Isa::times(plain, Isa::all(kFloat8Factor));
    }

    static QUIRE_INLINE typename Isa::F offsets(const uint8_t* at, typename Isa::F scale,
                                                typename Isa::F outer) {
        if constexpr (kParts.offsets == Offsets::kMinima) return Isa::load_halves(at);
        if constexpr (kParts.offsets == Offsets::kNested) {
            return Isa::minus(Isa::times(outer, Isa::to_float(Isa::load_bytes(at))));
        }
        const typename Isa::F zeros = kOffsetBytes == 4 ? Isa::load(at) : Isa::widen_bfloat16(at);
        return Isa::minus(Isa::times(scale, zeros));
    }
};

// Loads a vector's outer factors, in which its scales and offsets are nested.
template <class Factors>
QUIRE_INLINE void load_headers(typename Isa::F (&outer)[2], const uint8_t* block, int64_t lane) {
    outer[0] = outer[1] = Isa::zero();
    if constexpr (Factors::kHeaders > 0) outer[0] = Isa::load_halves(block + lane * 2);
    if constexpr (Factors::kHeaders > 1) outer[1] = Isa::load_halves(block + (kPanel + lane) * 2);
}

// Asks memory for some lines.
template <int64_t kBytes>
QUIRE_INLINE void prefetch_lines(const uint8_t* at) {
    unrolled<(kBytes + 63) / 64>(QUIRE_EACH(n) { __builtin_prefetch(at + n * 64); });
}

constexpr int64_t kFactorGroups = 32;  // whole blocks of nested factors

// As float32 [groups, kPanel] for tiles of several rows, which need not know their forms.
struct PlainFactors {
    alignas(64) float scales[kFactorGroups * kPanel];
    alignas(64) float raised[kFactorGroups * kPanel];  // 1.5 times the scales, if requested
    alignas(64) float offsets[kFactorGroups * kPanel];
};

// Decodes the factors of `count` groups of the block. Prefetches the factors that stand `ahead`
// bytes later.
template <WeightFormat kFormat, bool kRaises = false>
void decode_factors(PlainFactors& out, const PanelLayout& layout, const uint8_t* block,
                    int64_t count, int64_t ahead) {
    using Own = Factors<kFormat>;
    for (int64_t i = 0; i < count; block += layout.block_bytes) {
        const uint8_t* at = block + Own::kHeaderBytes;
        prefetch_lines<Own::kHeaderBytes>(block + ahead);
        for (int64_t j = 0; j < layout.block_groups; ++j, ++i, at += Own::kGroupBytes) {
            prefetch_lines<Own::kGroupBytes>(at + ahead);
            unrolled<Isa::kVectors>(QUIRE_EACH(v) {
                constexpr int64_t lane = v * Isa::kLanes;
                typename Isa::F outer[2];
                load_headers<Own>(outer, block, lane);
                const typename Isa::F scale = Own::scales(at + lane * Own::kScaleBytes, outer[0]);
                Isa::store(out.scales + i * kPanel + lane, scale);
                if constexpr (kRaises) {
                    const typename Isa::F raised = Isa::times(scale, Isa::all(1.5f));
                    Isa::store(out.raised + i * kPanel + lane, raised);
                }
                if constexpr (Own::kHasOffsets) {
                    const uint8_t* from = at + kPanel * Own::kScaleBytes + lane * Own::kOffsetBytes;
                    Isa::store(out.offsets + i * kPanel + lane, Own::offsets(from, scale, outer[1]));
                }
            });
        }
    }
}

}  // namespace
}  // namespace quire
