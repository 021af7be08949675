// Packing of weights, and their quantisation: symmetric, to the nearest, a scale per group.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "elements.h"
#include "linear.h"
#include "linear_copy.h"
#include "linear_panel.h"
#include "linear_rows.h"

namespace quire {
namespace {

constexpr int kInt8Levels = 127, kInt4Levels = 7;
constexpr int kTriedScales = 12;

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

// Rounds to [-levels, levels] times the scale. Adding 1.5 * 2^23 leaves the rounded number in the
// lowest bits.
QUIRE_VECTOR
void quantise(int32_t* out, const float* w, int64_t count, float inverse, int levels) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t value = bits_of(w[i] * inverse + 12582912.0f) - 0x4B400000;
        out[i] = std::min(std::max(value, -levels), levels);
    }
}

// In 16 sums, so that it vectorises; weights outside of a group of 16 are left out.
QUIRE_VECTOR
float squared_error(const float* w, int64_t count, float scale, float inverse, int levels) {
    float sums[16] = {};
    for (int64_t i = 0; i + 16 <= count; i += 16) {
        for (int64_t j = 0; j < 16; ++j) {
            int32_t value = bits_of(w[i + j] * inverse + 12582912.0f) - 0x4B400000;
            value = std::min(std::max(value, -levels), levels);
            const float error = w[i + j] - static_cast<float>(value) * scale;
            sums[j] += error * error;
        }
    }
    float total = 0;
    for (const float sum : sums) total += sum;
    return total;
}

// The scale of a group, exactly a bfloat16. Of int4 the largest weights may be clipped: with 15 levels
// that often costs less than what all others gain by finer steps.
float choose_scale(const float* w, int64_t count, float largest, int levels, bool search) {
    float best = rounded(largest / static_cast<float>(levels), true);
    if (!(best > 0) || !search) return best;
    float least = squared_error(w, count, best, 1.0f / best, levels);
    for (int i = 1; i <= kTriedScales; ++i) {
        const float share = 1.0f - 0.035f * static_cast<float>(i);
        const float scale = rounded(largest * share / static_cast<float>(levels), false);
        if (!(scale > 0)) break;
        const float error = squared_error(w, count, scale, 1.0f / scale, levels);
        if (error < least) {
            least = error;
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
        const bool is_int8 = weight_.format == WeightFormat::kInt8;
        const int levels = is_int8 ? kInt8Levels : kInt4Levels;
        const int64_t group = weight_.group;
        for (int64_t g = 0; g < weight_.groups(); ++g) {
            const float* values = row_.data() + g * group;
            const int64_t count = std::min(group, weight_.inputs - g * group);
            const float largest = largest_magnitude(values, count);
            if (!std::isfinite(largest)) error_.set(kNotFinite);
            const float scale = choose_scale(values, count, largest, levels, search_);
            quantise(integers_.data(), values, group, scale > 0 ? 1.0f / scale : 0.0f, levels);
            for (size_t i = 0; i < codes_.size(); ++i) {
                codes_[i] = static_cast<uint8_t>(integers_[i] + bias_);
            }
            Bfloat16 stored;
            narrow(stored, scale);
            lane_.put(panel, lane_.layout().scales(g), lane, &stored, sizeof stored);
            lane_.put_codes(panel, g, lane, codes_.data());
        }
    }

   private:
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
