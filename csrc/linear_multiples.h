// The scales of kInt4Multiples: of a group one scale and for each part of it a multiple, by the least
// squared error.
#pragma once

#include <cstdint>

#include "linear_formats.h"
#include "linear_rounding.h"

namespace quire {

// scale: one with five significant bits, so that its products with multiples are bfloat16; 0 where all
// weights are as good as 0. codes: of the parts' multiples.
struct Multiples {
    float scale = 0;
    uint32_t codes = 0;

    Multiple part(int64_t i) const { return {codes, i}; }
    float scale_of(int64_t i) const { return static_cast<float>(part(i).own) * scale; }
    Levels levels_of(int64_t i) const { return {-part(i).zero, 15 - part(i).zero}; }
};

class MultiplesChoice {
   public:
    // w: the weights of a group, all finite.
    explicit MultiplesChoice(const float* w) : w_(w) {
        for (int64_t part = 0; part < kMultipleParts; ++part) {
            const float* own = w + part * kMultipleInputs;
            const auto [lowest, highest] = std::minmax_element(own, own + kMultipleInputs);
            is_above_[part] = *highest >= -*lowest;
            largest_[part] = std::max(*highest, -*lowest);
            largest_of_all_ = std::max(largest_of_all_, largest_[part]);
        }
    }

    // Searches the scales downwards; the first one's multiple of 6 clips nothing. For each scale
    // and part it compares the least multiple that clips nothing and the one below.
    Multiples best() const {
        Multiples best;
        if (largest_of_all_ < kSmallest) return best;
        float lowest = 0;
        const int32_t first = (bits_of(largest_of_all_ / 48.0f) + kStep - 1) & -kStep;
        for (int32_t i = 0; i < kNumCandidateScales; ++i) {
            Multiples candidate;
            candidate.scale = float_of(first - i * kStep);
            float error = 0;
            for (int64_t part = 0; part < kMultipleParts; ++part) error += choose(candidate, part);
            if (i == 0 || error < lowest) {
                lowest = error;
                best = candidate;
            }
        }
        return best;
    }

   private:
    static constexpr int32_t kStep = 1 << 19;  // of the bits of numbers with five that count
    static constexpr int32_t kNumCandidateScales = 8;
    static constexpr float kSmallest = 1e-35f;  // of numbers whose scales have inverses

    // Chooses the part's multiple; returns its error.
    float choose(Multiples& candidate, int64_t part) const {
        const auto with = [&](int32_t multiple) {
            Multiples other = candidate;
            const auto code = static_cast<uint32_t>(multiple - 1);
            other.codes |= (is_above_[part] ? code | kAboveBit : code) << 4 * part;
            return other;
        };
        const int32_t highest = is_above_[part] ? 7 : 8;  // 8 * 8 would be too much
        int32_t multiple = 1;
        while (multiple < highest && static_cast<float>(8 * multiple) * candidate.scale < largest_[part]) {
            ++multiple;
        }
        const Multiples one = with(multiple), below = with(multiple > 1 ? multiple - 1 : 1);
        const float error = error_of(one, part), smaller = error_of(below, part);
        candidate = smaller < error ? below : one;
        return smaller < error ? smaller : error;
    }

    float error_of(const Multiples& candidate, int64_t part) const {
        return squared_error(w_ + part * kMultipleInputs, kMultipleInputs, candidate.scale_of(part),
                             candidate.levels_of(part));
    }

    const float* w_;
    bool is_above_[kMultipleParts];
    float largest_[kMultipleParts];
    float largest_of_all_ = 0;
};

}  // namespace quire
