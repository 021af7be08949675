// Rounding of weights to few integers: what packing chooses scales by.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.h"
#include "parallel.h"

namespace quire {

// The integers that weights are rounded to.
struct Levels {
    int32_t lowest, highest;
};

// The nearest integer, within the levels. Adding 1.5 * 2^23 leaves it in the lowest bits.
inline int32_t rounded_weight(float value, float inverse, Levels levels) {
    const int32_t nearest = bits_of(value * inverse + 12582912.0f) - 0x4B400000;
    return std::min(std::max(nearest, levels.lowest), levels.highest);
}

QUIRE_VECTOR
static void round_weights(int32_t* out, const float* w, int64_t count, float inverse, Levels levels) {
    for (int64_t i = 0; i < count; ++i) out[i] = rounded_weight(w[i], inverse, levels);
}

// Uses 16 sums, so that it vectorises, and skips weights after the last whole group of 16.
QUIRE_VECTOR
static float squared_error(const float* w, int64_t count, float scale, Levels levels) {
    const float inverse = 1.0f / scale;
    float sums[16] = {};
    for (int64_t i = 0; i + 16 <= count; i += 16) {
        for (int64_t j = 0; j < 16; ++j) {
            const auto value = static_cast<float>(rounded_weight(w[i + j], inverse, levels));
            const float error = w[i + j] - value * scale;
            sums[j] += error * error;
        }
    }
    float total = 0;
    for (const float sum : sums) total += sum;
    return total;
}

}  // namespace quire
