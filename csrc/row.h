// Code shared by the passes over a row of logits: floats as integers, the order of tokens, parts of
// rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace quire {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int32_t bits_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Maps a float's bits to a signed integer of the same order; it is its own inverse. Maxima of
// integers vectorise without fast-math, maxima of floats do not.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// The largest value of a piece of a row, and the largest bits without the sign (which show NaN).
struct Peak {
    float value;
    int32_t magnitude;
};

Peak peak_of(const float* values, int64_t count);

struct Best {
    int64_t id;
    float value;
};

// The first of the largest logits. The value is NaN if the row holds one.
Best arg_max_row(const float* row, int64_t vocab);

double log_sum_exp_row(const float* row, int64_t vocab, float temperature);

// Sums of exp((logit - peak) / temperature), in single precision and then double.
struct Mass {
    double all;
    double before;  // of the tokens that come before a given one
};

Mass mass_before(const float* row, int64_t vocab, float temperature, float peak, const Best& token);

// A token as one number: larger logits first, then lower ids.
inline uint64_t token_key(float value, int64_t id) {
    const int32_t order = ordered(bits_of(value + 0.0f));  // -0 becomes 0
    return (static_cast<uint64_t>(static_cast<uint32_t>(order) ^ 0x80000000u) << 32) |
           (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

inline float value_of(uint64_t key) {
    return float_of(ordered(static_cast<int32_t>(static_cast<uint32_t>(key >> 32) ^ 0x80000000u)));
}

inline int64_t id_of(uint64_t key) {
    return 0xFFFFFFFF - static_cast<int64_t>(key & 0xFFFFFFFFu);
}

// Collects the keys of the first k tokens, unordered.
void top_k_keys(std::vector<uint64_t>& keys, const float* row, int64_t vocab, int64_t k);

}  // namespace quire
