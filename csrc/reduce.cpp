#include <cmath>

#include "exponential.h"
#include "parallel.h"
#include "philox.h"
#include "row.h"
#include "sampling.h"

namespace quire {
namespace {

// Sum of kChunk terms, in 16 running sums.
inline double sum_of_terms(const float* terms) {
    constexpr int64_t kSums = 16;
    float sums[kSums] = {};
    for (int64_t i = 0; i < kChunk; i += kSums) {
        for (int64_t j = 0; j < kSums; ++j) sums[j] += terms[i + j];
    }
    double total = 0;
    for (float sum : sums) total += sum;
    return total;
}

// terms[kChunk] = exp((value - peak) * scale) of at most kChunk values, then zeros.
inline void exp_terms(float* terms, const float* values, int64_t count, float peak,
                      float scale) {
    for (int64_t i = 0; i < count; ++i) terms[i] = exp_negative((values[i] - peak) * scale);
    std::fill(terms + count, terms + kChunk, 0.0f);
}

QUIRE_VECTOR
double exp_sum(const float* values, int64_t count, float peak, float scale) {
    float terms[kChunk];
    exp_terms(terms, values, count, peak, scale);
    return sum_of_terms(terms);
}

// Returns the same sum, and the part of it before a token of this value. That part holds larger
// values, and equal ones with an index below num_lower.
QUIRE_VECTOR
Mass exp_sums(const float* values, int64_t count, float peak, float scale, float value,
              int64_t num_lower) {
    float terms[kChunk];
    exp_terms(terms, values, count, peak, scale);
    const double all = sum_of_terms(terms);
    for (int64_t i = 0; i < num_lower; ++i) terms[i] = values[i] >= value ? terms[i] : 0.0f;
    for (int64_t i = num_lower; i < count; ++i) terms[i] = values[i] > value ? terms[i] : 0.0f;
    return {all, sum_of_terms(terms)};
}

QUIRE_VECTOR
int64_t count_before(const float* row, int64_t vocab, int64_t id) {
    const float value = row[id];
    int64_t count = 0;
    for (int64_t first = 0; first < vocab; first += kChunk) {
        const int64_t end = std::min(first + kChunk, vocab);
        int32_t above = 0;
        for (int64_t i = first; i < end; ++i) above += row[i] > value;
        count += above;
    }
    for (int64_t i = 0; i < id; ++i) count += row[i] == value;
    return count;
}

}  // namespace

QUIRE_VECTOR
Peak peak_of(const float* values, int64_t count) {
    int32_t top = std::numeric_limits<int32_t>::min(), magnitude = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = bits_of(values[i]);
        top = std::max(top, ordered(bits));
        magnitude = std::max(magnitude, bits & 0x7FFFFFFF);
    }
    return {float_of(ordered(top)), magnitude};
}

Best arg_max_row(const float* row, int64_t vocab) {
    Best best{0, -kInfinity};
    int32_t magnitude = 0;
    for (int64_t first = 0; first < vocab; first += kChunk) {
        const int64_t count = std::min(kChunk, vocab - first);
        const Peak peak = peak_of(row + first, count);
        magnitude = std::max(magnitude, peak.magnitude);
        if (peak.value > best.value) best = {first, peak.value};
    }
    if (static_cast<uint32_t>(magnitude) > 0x7F800000u) {
        return {0, std::numeric_limits<float>::quiet_NaN()};
    }
    while (row[best.id] != best.value) ++best.id;
    return best;
}

double log_sum_exp_row(const float* row, int64_t vocab, float temperature) {
    const float peak = arg_max_row(row, vocab).value;
    if (!std::isfinite(peak)) return peak;
    const float scale = 1.0f / temperature;
    double total = 0;
    for (int64_t first = 0; first < vocab; first += kChunk) {
        total += exp_sum(row + first, std::min(kChunk, vocab - first), peak, scale);
    }
    return static_cast<double>(peak) / temperature + std::log(total);
}

Mass mass_before(const float* row, int64_t vocab, float temperature, float peak,
                 const Best& token) {
    const float scale = 1.0f / temperature;
    Mass mass{0, 0};
    for (int64_t first = 0; first < vocab; first += kChunk) {
        const int64_t count = std::min(kChunk, vocab - first);
        const int64_t num_lower = std::clamp(token.id - first, int64_t{0}, count);
        const Mass part = exp_sums(row + first, count, peak, scale, token.value, num_lower);
        mass.all += part.all;
        mass.before += part.before;
    }
    return mass;
}

void arg_max(int64_t* ids, float* values, const float* logits, int64_t rows, int64_t vocab,
             int num_threads) {
    parallel_for(rows, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const Best best = arg_max_row(logits + row * vocab, vocab);
            ids[row] = best.id;
            values[row] = best.value;
        }
    });
}

void log_sum_exp(double* out, const float* logits, const float* temperatures, int64_t rows,
                 int64_t vocab, int num_threads) {
    parallel_for(rows, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            out[row] = log_sum_exp_row(logits + row * vocab, vocab, temperatures[row]);
        }
    });
}

void token_rank(int64_t* ranks, const float* logits, const int64_t* ids, int64_t rows,
                int64_t vocab, int num_threads) {
    parallel_for(rows, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            ranks[row] = 1 + count_before(logits + row * vocab, vocab, ids[row]);
        }
    });
}

}  // namespace quire
