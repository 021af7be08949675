#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "exponential.h"
#include "parallel.h"
#include "row.h"

namespace quire {
namespace {

constexpr int64_t kLanes = 16;  // floats of a vector
constexpr int64_t kChunk = 2 * kLanes;
constexpr int64_t kTokens = 8;  // tokens of which one call of `dots` takes the scores
constexpr int64_t kAhead = 16;  // tokens between those that are read and those that are fetched
constexpr int64_t kNear = 32;   // tokens whose values are in the cache for all queries
constexpr int64_t kSpan = 256;  // tokens between two updates of the running softmax

using Half = uint16_t;
using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));
using Bits = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

#define QUIRE_INLINE inline __attribute__((always_inline))

// Vectors live inside of functions that are compiled per instruction set, never in a signature that
// is called across them; so they go in and out by reference.
//
// A chunk is two vectors. Of bfloat16 they are the even and the odd elements, which are the upper and
// lower halves of 32-bit words: widening them so needs no shuffles. Queries and sums of values are
// kept in the same order (`place_in_chunk`), so products never notice.
QUIRE_INLINE void load_chunk(Vector& even, Vector& odd, const Half* in) {
    Bits words;
    std::memcpy(&words, in, sizeof words);
    const Bits low = words << 16, high = words & 0xFFFF0000u;
    std::memcpy(&even, &low, sizeof even);
    std::memcpy(&odd, &high, sizeof odd);
}

QUIRE_INLINE void load_chunk(Vector& first, Vector& second, const float* in) {
    std::memcpy(&first, in, sizeof first);
    std::memcpy(&second, in + kLanes, sizeof second);
}

// Where element h of a head stands in a chunk-ordered head.
int64_t place_in_chunk(int64_t h, Half) {
    return h / kChunk * kChunk + h % 2 * kLanes + h % kChunk / 2;
}
int64_t place_in_chunk(int64_t h, float) { return h; }

// To the nearest, ties to even.
Half narrow(float value, Half) {
    const auto bits = static_cast<uint32_t>(bits_of(value));
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<Half>((bits >> 16) | 0x40u);
    return static_cast<Half>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

float narrow(float value, float) { return value; }

float widen(Half value) { return float_of(static_cast<int32_t>(value) << 16); }
float widen(float value) { return value; }

// Sums of neighbouring lanes: those of a, then those of b.
QUIRE_INLINE void add_pairs(Vector& out, const Vector& a, const Vector& b) {
    const Bits even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Bits odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    out = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// scores[0..8) = q0 . k[t] and scores[8..16) = q1 . k[t] for the 8 tokens t.
template <class Element>
QUIRE_INLINE void dots(float* scores, const float* q0, const float* q1,
                       const Element* const* k, int64_t size) {
    Vector sums[2 * kTokens] = {};
    for (int64_t h = 0; h < size; h += kChunk) {
        Vector a0, b0, a1, b1;
        load_chunk(a0, b0, q0 + h);
        load_chunk(a1, b1, q1 + h);
#pragma GCC unroll 8
        for (int64_t t = 0; t < kTokens; ++t) {
            Vector a, b;
            load_chunk(a, b, k[t] + h);
            sums[t] += a0 * a;
            sums[kTokens + t] += a1 * a;
            sums[t] += b0 * b;
            sums[kTokens + t] += b1 * b;
        }
    }
#pragma GCC unroll 4
    for (int64_t left = kTokens; left > 0; left /= 2) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < left; ++i) add_pairs(sums[i], sums[2 * i], sums[2 * i + 1]);
    }
    std::memcpy(scores, &sums[0], sizeof sums[0]);
}

// acc[h] += sum over t of weights[t] * v[t][h], for two queries and kWidth chunks of h.
template <int kWidth, class Element>
QUIRE_INLINE void add_weighted(float* acc0, float* acc1, const float* weights0,
                               const float* weights1, const Element* const* v, int64_t tokens,
                               int64_t h) {
    Vector sums0[2 * kWidth], sums1[2 * kWidth];
    std::memcpy(sums0, acc0 + h, sizeof sums0);
    std::memcpy(sums1, acc1 + h, sizeof sums1);
    for (int64_t t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
        for (int i = 0; i < kWidth; ++i) {
            Vector a, b;
            load_chunk(a, b, v[t] + h + i * kChunk);
            sums0[2 * i] += weights0[t] * a;
            sums1[2 * i] += weights1[t] * a;
            sums0[2 * i + 1] += weights0[t] * b;
            sums1[2 * i + 1] += weights1[t] * b;
        }
    }
    std::memcpy(acc0 + h, sums0, sizeof sums0);
    std::memcpy(acc1 + h, sums1, sizeof sums1);
}

// Asks for the memory of a token's keys or values, which will be read soon.
template <class Element>
QUIRE_INLINE void fetch(const Element* token, int64_t size) {
    constexpr int64_t kLine = 64 / sizeof(Element);
    for (int64_t h = 0; h < size; h += kLine) __builtin_prefetch(token + h);
}

// scores[m, t] = q[m] . k[t], for `tokens` tokens; an odd last query is computed twice.
template <class Element>
QUIRE_INLINE void score_all(float* scores, const float* q, int64_t queries,
                            const Element* const* k, int64_t tokens, int64_t size) {
    for (int64_t first = 0; first < tokens; first += kTokens) {
        const int64_t count = std::min(kTokens, tokens - first);
        for (int64_t t = first + kAhead; t < std::min(first + kAhead + kTokens, tokens); ++t) {
            fetch(k[t], size);
        }
        const Element* some[kTokens];
        for (int64_t t = 0; t < kTokens; ++t) some[t] = k[first + std::min(t, count - 1)];
        for (int64_t m = 0; m < queries; m += 2) {
            const int64_t other = std::min(m + 1, queries - 1);
            float both[2 * kTokens];
            dots(both, q + m * size, q + other * size, some, size);
            std::copy_n(both, count, scores + m * kSpan + first);
            std::copy_n(both + kTokens, count, scores + other * kSpan + first);
        }
    }
}

// acc[m] += sum over t of weights[m, t] * v[t]; unused: room for one more query.
template <class Element>
QUIRE_INLINE void weigh_all(float* acc, float* unused, const float* weights, int64_t queries,
                            const Element* const* v, int64_t tokens, int64_t size) {
    for (int64_t first = 0; first < tokens; first += kNear) {
        const int64_t count = std::min(kNear, tokens - first);
        for (int64_t t = first + kNear; t < std::min(first + 2 * kNear, tokens); ++t) {
            fetch(v[t], size);
        }
        for (int64_t m = 0; m < queries; m += 2) {
            // An odd last query is computed twice, the second time into memory that nobody reads.
            const bool pair = m + 1 < queries;
            const float* weights0 = weights + m * kSpan + first;
            const float* weights1 = pair ? weights0 + kSpan : weights0;
            float* acc0 = acc + m * size;
            float* acc1 = pair ? acc0 + size : unused;
            int64_t h = 0;
            for (; h + 4 * kChunk <= size; h += 4 * kChunk) {
                add_weighted<4>(acc0, acc1, weights0, weights1, v + first, count, h);
            }
            for (; h < size; h += kChunk) {
                add_weighted<1>(acc0, acc1, weights0, weights1, v + first, count, h);
            }
        }
    }
}

QUIRE_VECTOR
void scores_of(float* scores, const float* q, int64_t queries, const float* const* k,
               int64_t tokens, int64_t size) {
    score_all(scores, q, queries, k, tokens, size);
}

QUIRE_VECTOR
void scores_of_halves(float* scores, const float* q, int64_t queries, const Half* const* k,
                      int64_t tokens, int64_t size) {
    score_all(scores, q, queries, k, tokens, size);
}

QUIRE_VECTOR
void add_values(float* acc, float* unused, const float* weights, int64_t queries,
                const float* const* v, int64_t tokens, int64_t size) {
    weigh_all(acc, unused, weights, queries, v, tokens, size);
}

QUIRE_VECTOR
void add_values_of_halves(float* acc, float* unused, const float* weights, int64_t queries,
                          const Half* const* v, int64_t tokens, int64_t size) {
    weigh_all(acc, unused, weights, queries, v, tokens, size);
}

void scores_of(float* scores, const float* q, int64_t queries, const Half* const* k,
               int64_t tokens, int64_t size) {
    scores_of_halves(scores, q, queries, k, tokens, size);
}

void add_values(float* acc, float* unused, const float* weights, int64_t queries,
                const Half* const* v, int64_t tokens, int64_t size) {
    add_values_of_halves(acc, unused, weights, queries, v, tokens, size);
}

QUIRE_VECTOR
void exp_from(float* values, int64_t count, float peak) {
    for (int64_t i = 0; i < count; ++i) values[i] = exp_negative(values[i] - peak);
}

// The softmax so far of one query.
struct Running {
    float peak = -kInfinity;
    float sum = 0;
};

// One row's attention for one KV head: M = G * (new tokens) queries over its context.
template <class Element>
class RowHead {
   public:
    RowHead(const PagedRows& step, int64_t row, int64_t head)
        : step_(step),
          head_(head),
          table_(step.tables + row * step.table_stride),
          context_(step.context_lens[row]),
          first_token_(step.query_starts[row]),
          new_tokens_(step.query_starts[row + 1] - first_token_),
          queries_(new_tokens_ * step.group),
          running_(static_cast<size_t>(queries_)) {
        const int64_t size = step.head_dim;
        memory_.assign(static_cast<size_t>(queries_ * (2 * size + kSpan) + size), 0.0f);
        q_ = memory_.data();
        acc_ = q_ + queries_ * size;
        unused_ = acc_ + queries_ * size;
        scores_ = unused_ + size;
    }

    void run(Element* out, const Element* q, const Element* keys, const Element* values) {
        read_queries(q);
        const int64_t oldest = context_ - new_tokens_;
        const int64_t first = first_seen(oldest);
        for (int64_t span = first / kSpan * kSpan; span < context_; span += kSpan) {
            const int64_t begin = std::max(span, first), end = std::min(span + kSpan, context_);
            const Element *keys_at[kSpan], *values_at[kSpan];
            find(keys_at, keys, begin, end);
            scores_of(scores_, q_, queries_, keys_at, end - begin, step_.head_dim);
            find(values_at, values, begin, end);
            for (int64_t t = 0; t < std::min(kNear, end - begin); ++t) {
                fetch(values_at[t], step_.head_dim);
            }
            for (int64_t m = 0; m < queries_; ++m) weigh(m, begin, end);
            add_values(acc_, unused_, scores_, queries_, values_at, end - begin, step_.head_dim);
        }
        write(out);
    }

   private:
    int64_t first_seen(int64_t position) const {
        return step_.window == 0 ? 0 : std::max<int64_t>(0, position - step_.window + 1);
    }

    // Elements before query m: token by token, the G heads of this KV head together.
    int64_t place(int64_t m, int64_t token_stride) const {
        const int64_t token = first_token_ + m / step_.group;
        return token * token_stride + (head_ * step_.group + m % step_.group) * step_.head_dim;
    }

    void read_queries(const Element* q) {
        for (int64_t m = 0; m < queries_; ++m) {
            const Element* from = q + place(m, step_.q_stride);
            float* mine = q_ + m * step_.head_dim;
            for (int64_t h = 0; h < step_.head_dim; ++h) {
                mine[place_in_chunk(h, Element{})] = widen(from[h]) * step_.scale;
            }
        }
    }

    // Where the keys or values of positions [begin, end) stand.
    void find(const Element** places, const Element* stored, int64_t begin, int64_t end) const {
        const int64_t size = step_.head_dim, block_size = step_.block_size;
        for (int64_t t = begin; t < end; ++t) {
            const int64_t block = head_ * step_.num_blocks + table_[t / block_size];
            *places++ = stored + (block * block_size + t % block_size) * size;
        }
    }

    // Scores of query m for positions [begin, end) become weights; what came before is rescaled.
    void weigh(int64_t m, int64_t begin, int64_t end) {
        const int64_t position = context_ - new_tokens_ + m / step_.group;
        const int64_t low = std::max(begin, first_seen(position)) - begin;
        const int64_t high = std::min(end, position + 1) - begin;
        float* scores = scores_ + m * kSpan;
        std::fill(scores, scores + std::min(std::max<int64_t>(low, 0), end - begin), 0.0f);
        std::fill(scores + std::max<int64_t>(high, 0), scores + (end - begin), 0.0f);
        if (low >= high) return;
        Running& so_far = running_[static_cast<size_t>(m)];
        const Peak largest = peak_of(scores + low, high - low);
        if (static_cast<uint32_t>(largest.magnitude) >= 0x7F800000u) {
            so_far.sum = std::numeric_limits<float>::quiet_NaN();  // and so it stays: out is NaN
        }
        const float peak = std::max(so_far.peak, largest.value);
        exp_from(scores + low, high - low, peak);
        const float rescale = so_far.sum == 0 ? 0.0f : exp_negative(so_far.peak - peak);
        so_far.sum *= rescale;
        for (int64_t t = low; t < high; ++t) so_far.sum += scores[t];
        so_far.peak = peak;
        float* acc = acc_ + m * step_.head_dim;
        for (int64_t h = 0; h < step_.head_dim; ++h) acc[h] *= rescale;
    }

    void write(Element* out) const {
        const int64_t stride = step_.kv_heads * step_.group * step_.head_dim;
        for (int64_t m = 0; m < queries_; ++m) {
            const float* acc = acc_ + m * step_.head_dim;
            const float scale = 1.0f / running_[static_cast<size_t>(m)].sum;
            Element* mine = out + place(m, stride);
            for (int64_t h = 0; h < step_.head_dim; ++h) {
                mine[h] = narrow(acc[place_in_chunk(h, Element{})] * scale, Element{});
            }
        }
    }

    const PagedRows& step_;
    const int64_t head_;
    const int32_t* table_;
    const int64_t context_, first_token_, new_tokens_, queries_;
    std::vector<Running> running_;
    std::vector<float> memory_;
    float *q_, *acc_, *unused_, *scores_;
};

// Head by head, all rows of a head together: rows that share blocks find them in the cache.
template <class Element>
void attend(Element* out, const Element* q, const Element* keys, const Element* values,
            const PagedRows& step, int num_threads) {
    parallel_parts(step.kv_heads * step.num_rows, num_threads, [&](int64_t part) {
        const int64_t head = part / step.num_rows, row = step.rows[part % step.num_rows];
        RowHead<Element>(step, row, head).run(out, q, keys, values);
    });
}

}  // namespace

void paged_attention(float* out, const float* q, const float* keys, const float* values,
                     const PagedRows& step, int num_threads) {
    attend(out, q, keys, values, step, num_threads);
}

void paged_attention(Half* out, const Half* q, const Half* keys, const Half* values,
                     const PagedRows& step, int num_threads) {
    attend(out, q, keys, values, step, num_threads);
}

}  // namespace quire
