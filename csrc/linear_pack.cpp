// Packing of weights, and their quantisation: symmetric, to the nearest, a scale per group.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "elements.h"
#include "linear.h"
#include "linear_copy.h"
#include "linear_multiples.h"
#include "linear_panel.h"
#include "linear_rounding.h"
#include "linear_rows.h"

namespace quire {
namespace {

constexpr Levels kInt8Levels{-127, 127}, kInt4Levels{-7, 7};
constexpr int kNumCandidateScales = 12;

float rounded(float scale, bool up) {
    Bfloat16 near;
    narrow(near, scale);
    if (up && widen(near) < scale) ++near.bits;
    return widen(near);
}

QUIRE_VECTOR
float largest_magnitude(const float* w, int64_t count) {
    int32_t peak = 0;
    for (int64_t i = 0; i < count; ++i) peak = std::max(peak, bits_of(w[i]) & 0x7FFFFFFF);
    return float_of(peak);
}

// The scale of a group, exactly a bfloat16. Of int4 the largest weights may be clipped: with 15 levels
// that often costs less than what all others gain by finer steps.
float choose_scale(const float* w, int64_t count, float largest, Levels levels, bool search) {
    const auto highest = static_cast<float>(levels.highest);
    float best = rounded(largest / highest, true);
    if (!(best > 0) || !search) return best;
    float min_error = squared_error(w, count, best, levels);
    for (int i = 1; i <= kNumCandidateScales; ++i) {
        const float share = 1.0f - 0.035f * static_cast<float>(i);
        const float scale = rounded(largest * share / highest, false);
        if (!(scale > 0)) break;
        const float error = squared_error(w, count, scale, levels);
        if (error < min_error) {
            min_error = error;
            best = scale;
        }
    }
    return best;
}

// Packs one output of a panel. error: set where a number is not finite.
class Quantiser {
   public:
    Quantiser(const PackedWeight& weight, const WeightRows& from, bool search,
              PackError& error)
        : weight_(weight),
          reader_(weight, from, error),
          search_(search),
          error_(error),
          bias_(stored_bias(weight)),
          lane_(weight),
          row_(static_cast<size_t>(weight.groups() * weight.group)),
          integers_(static_cast<size_t>(weight.group)),
          codes_(integers_.size()) {}

    // n: of the output, -1 for the filling of the last panel.
    template <class T>
    void pack(uint8_t* panel, int64_t lane, int64_t n) {
        std::fill(row_.begin(), row_.end(), 0.0f);
        if (n >= 0) {
            const uint8_t* row = reader_.row(n);
            for (size_t k = 0; k < static_cast<size_t>(weight_.inputs); ++k) {
                T value;
                std::memcpy(&value, row + k * sizeof value, sizeof value);
                row_[k] = widen(value);
            }
        }
        for (int64_t g = 0; g < weight_.groups(); ++g) {
            const float* values = row_.data() + g * weight_.group;
            const float largest = largest_magnitude(values, weight_.group);
            if (!std::isfinite(largest)) {
                error_.set(kNotFinite);
            } else if (weight_.format == WeightFormat::kInt4Multiples) {
                put_multiples(panel, lane, g, values);
            } else {
                put_scaled(panel, lane, g, values, largest);
            }
        }
    }

   private:
    void put_scaled(uint8_t* panel, int64_t lane, int64_t g, const float* values, float largest) {
        const Levels levels = weight_.format == WeightFormat::kInt8 ? kInt8Levels : kInt4Levels;
        const int64_t count = std::min(weight_.group, weight_.inputs - g * weight_.group);
        const float scale = choose_scale(values, count, largest, levels, search_);
        round(0, values, weight_.group, scale, levels, bias_);
        Bfloat16 stored;
        narrow(stored, scale);
        lane_.put(panel, lane_.layout().scales(g), lane, &stored, sizeof stored);
        lane_.put_codes(panel, g, lane, codes_.data());
    }

    void put_multiples(uint8_t* panel, int64_t lane, int64_t g, const float* values) {
        const Multiples best = MultiplesChoice(values).best();
        for (int64_t part = 0; part < kMultipleParts; ++part) {
            const int64_t first = part * kMultipleInputs;
            round(first, values + first, kMultipleInputs, best.scale_of(part), best.levels_of(part),
                  best.part(part).zero);
        }
        const uint32_t factors = static_cast<uint32_t>(bits_of(best.scale)) | best.codes;
        lane_.put(panel, lane_.layout().scales(g), lane, &factors, sizeof factors);
        lane_.put_codes(panel, g, lane, codes_.data());
    }

    // The codes of `count` inputs of a group from `first` on.
    void round(int64_t first, const float* values, int64_t count, float scale, Levels levels,
               int32_t bias) {
        const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
        round_weights(integers_.data(), values, count, inverse, levels);
        for (int64_t i = 0; i < count; ++i) {
            const int32_t integer = integers_[static_cast<size_t>(i)];
            codes_[static_cast<size_t>(first + i)] = static_cast<uint8_t>(integer + bias);
        }
    }

    const PackedWeight& weight_;
    RowReader reader_;
    const bool search_;
    PackError& error_;
    const int32_t bias_;
    PanelLane lane_;
    std::vector<float> row_;
    std::vector<int32_t> integers_;
    std::vector<uint8_t> codes_;
};

template <class T>
int pack_elements(uint8_t* data, const PackedWeight& weight, const WeightRows& from, bool search,
                  int num_threads) {
    PackError error;
    pack_panels(data, weight, num_threads, [&] { return Quantiser(weight, from, search, error); },
                [](Quantiser& packer, uint8_t* panel, int64_t lane, int64_t n) {
                    packer.template pack<T>(panel, lane, n);
                });
    return error.code();
}

}  // namespace

int pack_weight(uint8_t* data, const PackedWeight& weight, const WeightRows& from, bool search,
                int num_threads) {
    if (!weight.has_groups()) return copy_panels(data, weight, from, num_threads);
    switch (from.element) {
        case Element::kFloat32:
            return pack_elements<float>(data, weight, from, search, num_threads);
        case Element::kBfloat16:
            return pack_elements<Bfloat16>(data, weight, from, search, num_threads);
        default: return pack_elements<Float16>(data, weight, from, search, num_threads);
    }
}

}  // namespace quire
