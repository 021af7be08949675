// Rows of packed weights, with the values that they stand for.
#include <vector>

#include "elements.h"
#include "linear.h"
#include "linear_panel.h"

namespace quire {
namespace {

// Input k of the output in `lane` of a panel, of weights without groups.
float plain_value(const PackedWeight& weight, const uint8_t* panel, int64_t lane, int64_t k) {
    const int64_t width = linear_kernels(weight.variant).panel;
    const auto element = [&](auto sample, int64_t place) {
        std::memcpy(&sample, panel + place * static_cast<int64_t>(sizeof sample), sizeof sample);
        return widen(sample);
    };
    switch (weight.format) {
        case WeightFormat::kFloat32: return element(0.0f, k * width + lane);
        case WeightFormat::kFloat16: return element(Float16{}, k * width + lane);
        default: return element(Bfloat16{}, (k / 2 * width + lane) * 2 + k % 2);
    }
}

float float4_value(int32_t code) {
    constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

float power(uint8_t exponent) {  // 2^(exponent - 127), of an e8m0
    return float_of(exponent > 0 ? exponent << 23 : 0x00400000);
}

// One output of a weight that has groups.
class LaneReader {
   public:
    explicit LaneReader(const PackedWeight& weight)
        : weight_(weight),
          parts_(weight.parts()),
          bias_(stored_bias(weight)),
          lane_(weight),
          codes_(static_cast<size_t>(weight.group)) {}

    template <class T>
    void read(T* out, int64_t n) {
        const int64_t width = lane_.layout().panel;
        panel_ = weight_.data + n / width * packed_panel_bytes(weight_);
        at_ = n % width;
        const int32_t* order = weight_.order();
        for (int64_t g = 0; g < weight_.groups(); ++g) {
            const int64_t begin = g * weight_.group, left = weight_.inputs - begin;
            const int64_t count = left < weight_.group ? left : weight_.group;
            const float scale = this->scale(g), zero = this->zero(g), offset = this->offset(g);
            lane_.get_codes(codes_.data(), panel_, g, at_);
            if (parts_.values == Values::kInt4Multiples) multiply(g);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t k = order == nullptr ? begin + i : order[begin + i];
                narrow(out[k], (value(codes_[static_cast<size_t>(i)]) - zero) * scale - offset);
            }
        }
    }

   private:
    const PanelLayout& layout() const { return lane_.layout(); }

    // Makes products with the group's multiples of the integers, plus the bias.
    void multiply(int64_t g) {
        const auto factors = lane_.get<uint32_t>(panel_, layout().scales(g), at_);
        for (int64_t i = 0; i < weight_.group; ++i) {
            uint8_t& code = codes_[static_cast<size_t>(i)];
            const Multiple multiple(factors, i / kMultipleInputs);
            code = static_cast<uint8_t>((code - multiple.zero) * multiple.own + kMultipleBias);
        }
    }

    template <class T>
    float factor(int64_t offset) const {
        return widen(lane_.get<T>(panel_, offset, at_));
    }

    float value(uint8_t code) const {
        switch (parts_.values) {
            case Values::kFloat8: return widen(float8_as_half(code)) * 256.0f;
            case Values::kFloat4: return float4_value(code);
            case Values::kInt8: return static_cast<int8_t>(code - bias_);
            default: return static_cast<float>(code - bias_);
        }
    }

    float scale(int64_t g) const {
        const int64_t at = layout().scales(g);
        switch (parts_.scales) {
            case Scales::kBfloat16: return factor<Bfloat16>(at);
            case Scales::kFloat16: return factor<Float16>(at);
            case Scales::kFloat32: return factor<float>(at);
            case Scales::kWithMultiples:
                return float_of(lane_.get<int32_t>(panel_, at, at_) & -65536);
            case Scales::kPower: return power(lane_.get<uint8_t>(panel_, at, at_));
            default: break;
        }
        const float outer = factor<Float16>(layout().block(g));
        if (parts_.signed_scales) return outer * lane_.get<int8_t>(panel_, at, at_);
        return outer * lane_.get<uint8_t>(panel_, at, at_);
    }

    float zero(int64_t g) const {
        if (parts_.offsets != Offsets::kZeros) return 0.0f;
        const int64_t at = layout().offsets(g);
        return parts_.scales == Scales::kFloat32 ? factor<float>(at) : factor<Bfloat16>(at);
    }

    float offset(int64_t g) const {
        const int64_t at = layout().offsets(g);
        if (parts_.offsets == Offsets::kMinima) return -factor<Float16>(at);
        if (parts_.offsets != Offsets::kNested) return 0.0f;
        const float outer = factor<Float16>(layout().block(g) + layout().panel * 2);
        return outer * lane_.get<uint8_t>(panel_, at, at_);
    }

    const PackedWeight& weight_;
    const FormatParts& parts_;
    const int32_t bias_;
    PanelLane lane_;
    std::vector<uint8_t> codes_;
    const uint8_t* panel_ = nullptr;
    int64_t at_ = 0;
};

template <class T>
void unpack(const MutableMatrix& out, const PackedWeight& weight, const int64_t* ids) {
    auto* rows = static_cast<T*>(out.data);
    if (weight.has_groups()) {
        LaneReader reader(weight);
        for (int64_t i = 0; i < out.rows; ++i) reader.read(rows + i * out.stride, ids[i]);
        return;
    }
    const int64_t width = linear_kernels(weight.variant).panel;
    for (int64_t i = 0; i < out.rows; ++i) {
        const uint8_t* panel = weight.data + ids[i] / width * packed_panel_bytes(weight);
        for (int64_t k = 0; k < weight.inputs; ++k) {
            narrow(rows[i * out.stride + k], plain_value(weight, panel, ids[i] % width, k));
        }
    }
}

}  // namespace

void unpack_rows(const MutableMatrix& out, const PackedWeight& weight, const int64_t* ids) {
    switch (out.element) {
        case Element::kFloat32: return unpack<float>(out, weight, ids);
        case Element::kBfloat16: return unpack<Bfloat16>(out, weight, ids);
        default: unpack<Float16>(out, weight, ids);
    }
}

}  // namespace quire
