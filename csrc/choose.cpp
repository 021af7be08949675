#include <cmath>

#include "parallel.h"
#include "philox.h"
#include "row.h"
#include "sampling.h"

namespace quire {
namespace {

using Keys = std::vector<uint64_t>;

double sum_of(const Keys& keys, size_t begin, size_t end, float temperature, float peak) {
    double total = 0;
    for (size_t i = begin; i < end; ++i) {
        total += std::exp((double{value_of(keys[i])} - peak) / temperature);
    }
    return total;
}

// Returns the last token of the shortest prefix of the sorted tokens whose weights reach the goal.
// It repeatedly halves the part that holds it, so the keys need not be sorted.
uint64_t nucleus_end(Keys& keys, double goal, float temperature, float peak) {
    size_t low = 0, high = keys.size();
    double mass = 0;  // of [0, low)
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        const auto at = [&](size_t i) { return keys.begin() + static_cast<std::ptrdiff_t>(i); };
        std::nth_element(at(low), at(middle), at(high), std::greater<uint64_t>());
        const double half = sum_of(keys, low, middle, temperature, peak);
        if (mass + half >= goal) {
            high = middle;
        } else {
            mass += half;
            low = middle;
        }
    }
    return keys[low];
}

struct Filter {
    int64_t top_k;  // 0 or less: off
    float top_p, min_p;
};

// Returns the smallest key that min-p, then top-k, then top-p keep in a row.
uint64_t cutoff_of(Keys& keys, const float* row, int64_t vocab, float temperature,
                   const Filter& filter, float peak) {
    const bool has_top_k = filter.top_k > 0 && filter.top_k < vocab;
    const bool has_top_p = filter.top_p < 1.0f, has_min_p = filter.min_p > 0.0f;
    if (!has_top_k && !has_min_p && !has_top_p) return 0;
    const double floor =
        has_min_p ? double{peak} / temperature + std::log(double{filter.min_p}) : -kInfinity;
    const auto is_below = [&](uint64_t key) { return double{value_of(key)} / temperature < floor; };
    if (has_top_k) {
        top_k_keys(keys, row, vocab, filter.top_k);
        keys.erase(std::remove_if(keys.begin(), keys.end(), is_below), keys.end());
    } else {
        keys.clear();
        for (int64_t first = 0; first < vocab; first += kChunk) {
            const int64_t end = std::min(first + kChunk, vocab);
            if (is_below(token_key(peak_of(row + first, end - first).value, first))) continue;
            for (int64_t id = first; id < end; ++id) {
                const uint64_t key = token_key(row[id], id);
                if (!is_below(key)) keys.push_back(key);
            }
        }
    }
    if (!has_top_p) return *std::min_element(keys.begin(), keys.end());
    const double total = sum_of(keys, 0, keys.size(), temperature, peak);
    return nucleus_end(keys, filter.top_p * total, temperature, peak);
}

// No token with this logit and this noise scores more: with u >= 2^e the Gumbel noise
// -log(-log(1 - u)) is at most -e * log(2).
inline float score_bound(float logit, float noise, float scale) {
    const int32_t exponent = bits_of(noise) >> 23;
    return logit * scale + static_cast<float>(127 - exponent) * 0.69314718f;
}

QUIRE_VECTOR
bool can_beat(const float* logits, const float* noise, int64_t count, float scale, float mark) {
    int32_t any = 0;
    for (int64_t i = 0; i < count; ++i) any |= score_bound(logits[i], noise[i], scale) > mark;
    return any != 0;
}

inline double score_of(float logit, float temperature, float noise) {
    return static_cast<double>(logit) / temperature - std::log(-std::log1p(-double{noise}));
}

// The noise of a row's columns, of which the first is token `first`.
struct Noise {
    Stream stream;
    int64_t first;

    // Writes the numbers of columns [column, column + kChunk).
    void chunk(int64_t column, float* out) const {
        const int64_t id = first + column, skipped = id % 4;
        if (skipped == 0) return uniform_chunk(stream, id, out);
        float all[2 * kChunk];
        uniform_chunk(stream, id - skipped, all);
        uniform_chunk(stream, id - skipped + kChunk, all + kChunk);
        std::copy_n(all + skipped, kChunk, out);
    }
};

// Gumbel-max over the tokens whose key is at least the cutoff. The most probable token sets the
// mark; chunks that cannot reach it are passed over, most of them before their noise is made.
int64_t gumbel_max(const float* row, int64_t vocab, float temperature, const Noise& source,
                   uint64_t cutoff, const Best& peak) {
    constexpr float kMostGumbel = 23.0f;  // -log(2^-33), rounded up
    float noise[kChunk];
    const float scale = 1.0f / temperature;
    const float threshold = cutoff == 0 ? -kInfinity : value_of(cutoff);
    source.chunk(peak.id / 4 * 4, noise);
    int64_t best_id = peak.id;
    double best = score_of(peak.value, temperature, noise[peak.id % 4]);
    for (int64_t first = 0; first < vocab; first += kChunk) {
        const int64_t count = std::min(kChunk, vocab - first);
        const float* logits = row + first;
        // Less than the mark by more than the bounds' rounding.
        const float mark = static_cast<float>(best - 1e-2 - 1e-5 * std::fabs(best));
        const float largest = peak_of(logits, count).value;
        if (largest < threshold || largest * scale + kMostGumbel < mark) continue;
        source.chunk(first, noise);
        if (!can_beat(logits, noise, count, scale, mark)) continue;
        for (int64_t i = 0; i < count; ++i) {
            if (!(score_bound(logits[i], noise[i], scale) > mark)) continue;
            if (token_key(logits[i], first + i) < cutoff) continue;
            const double score = score_of(logits[i], temperature, noise[i]);
            if (score > best || (score == best && first + i < best_id)) {
                best = score;
                best_id = first + i;
            }
        }
    }
    return best_id;
}

// Samples from a nucleus without finding its end. The winner among all tokens also wins in the
// nucleus if it lies there, which has probability top_p or more. So the winner is checked first. If
// it lies outside, the tokens after it do too, and the search repeats among the tokens before it.
int64_t choose_in_nucleus(Keys& keys, const float* row, int64_t vocab, float temperature,
                          const Filter& filter, const Noise& noise, const Best& peak) {
    constexpr int kMaxAttempts = 8;        // a winner halves the mass, more or less: enough for top_p of 0.02
    constexpr double kDoubt = 1e-4;  // more than the masses' rounding; within it keys decide
    uint64_t cutoff = 0;
    for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
        const int64_t id = gumbel_max(row, vocab, temperature, noise, cutoff, peak);
        if (id == peak.id) return id;
        const Mass mass = mass_before(row, vocab, temperature, peak.value, {id, row[id]});
        const double excess = mass.before / mass.all - double{filter.top_p};
        if (excess < -kDoubt) return id;
        if (excess <= kDoubt) break;
        cutoff = token_key(row[id], id) + 1;
    }
    cutoff = cutoff_of(keys, row, vocab, temperature, filter, peak.value);
    return gumbel_max(row, vocab, temperature, noise, cutoff, peak);
}

int64_t choose_filtered(Keys& keys, const float* row, int64_t vocab, float temperature,
                        const Filter& filter, const Noise& noise, const Best& peak) {
    const bool has_top_k = filter.top_k > 0 && filter.top_k < vocab;
    if (!has_top_k && filter.min_p <= 0.0f && filter.top_p < 1.0f) {
        return choose_in_nucleus(keys, row, vocab, temperature, filter, noise, peak);
    }
    const uint64_t cutoff = cutoff_of(keys, row, vocab, temperature, filter, peak.value);
    return gumbel_max(row, vocab, temperature, noise, cutoff, peak);
}

}  // namespace

void choose(int64_t* ids, const float* logits, const float* temperatures, const int64_t* top_k,
            const float* top_p, const float* min_p, int64_t rows, int64_t vocab, int64_t first,
            const int64_t* seeds, const int64_t* sample_index, const int64_t* positions,
            int num_threads) {
    parallel_for(rows, num_threads, [=](int64_t begin, int64_t end) {
        Keys keys;
        for (int64_t i = begin; i < end; ++i) {
            const float* row = logits + i * vocab;
            const Best peak = arg_max_row(row, vocab);
            ids[i] = peak.id;
            if (!std::isfinite(peak.value)) continue;  // the caller reports this row
            const Filter filter = top_k == nullptr ? Filter{0, 1.0f, 0.0f}
                                                   : Filter{top_k[i], top_p[i], min_p[i]};
            const Noise noise{{seeds[i], sample_index[i], positions[i]}, first};
            ids[i] = choose_filtered(keys, row, vocab, temperatures[i], filter, noise, peak);
        }
    });
}

}  // namespace quire
