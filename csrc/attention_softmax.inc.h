// The softmax of a span's scores, and how spans are folded: included by attention_tiles.inc.h.
#pragma once

namespace quire {
namespace {

#define QUIRE_INLINE inline __attribute__((always_inline))
#define QUIRE_ALWAYS __attribute__((always_inline))
#define QUIRE_EACH(index) [&](auto index) QUIRE_ALWAYS

using F = typename Isa::F;
using I = typename Isa::I;

constexpr int64_t kLanes = Isa::kLanes;
constexpr int64_t kSumLanes = 16;  // of a sum of weights, in every variant
constexpr int kSumVectors = kSumLanes / kLanes;

// body(0), body(1), ... with numbers that are known to the compiler.
template <int kCount, class Body>
QUIRE_INLINE void unrolled(const Body& body) {
    if constexpr (kCount > 0) {
        unrolled<kCount - 1>(body);
        body(std::integral_constant<int, kCount - 1>{});
    }
}

constexpr float kLowest = -3.40282347e38f;
constexpr float kEmptyPeak = -__builtin_inff();

inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

template <class T>
inline void fill(T* begin, T* end, T value) {
    for (; begin < end; ++begin) *begin = value;
}


// Scores are multiplied by this, so that weights are powers of 2.
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// p(r), nearly 2^r for |r| <= 1/2, and 1 for 0. The relative error is below 2e-7. With kShort it is
// below 3e-6, far less than the error of rounding to bfloat16.
template <bool kShort>
QUIRE_INLINE F power_of(F r) {
    if constexpr (kShort) {
        F p = Isa::fma(Isa::all(9.58285e-3f), r, Isa::all(5.590643e-2f));
        p = Isa::fma(p, r, Isa::all(2.4024099e-1f));
        p = Isa::fma(p, r, Isa::all(6.9312419e-1f));
        return Isa::fma(p, r, Isa::all(1.0f));
    }
    F p = Isa::fma(Isa::all(1.32647e-3f), r, Isa::all(9.67151e-3f));
    p = Isa::fma(p, r, Isa::all(5.550734e-2f));
    p = Isa::fma(p, r, Isa::all(2.4022242e-1f));
    p = Isa::fma(p, r, Isa::all(6.9314698e-1f));
    return Isa::fma(p, r, Isa::all(1.0f));
}

// 2^x for x <= 0; 0 below -126 and for NaN. It is 2^n * p(r) with r = x - n: adding 1.5 * 2^23 rounds
// to n and leaves it in the lowest bits.
template <bool kShort = false>
QUIRE_INLINE F exp2_of(F x) {
    const F round = Isa::all(12582912.0f);
    const F shifted = x + round;
    const F p = power_of<kShort>(x - (shifted - round));
    const I bits = reinterpret_cast<I>(p) + (reinterpret_cast<I>(shifted) << 23);
    return reinterpret_cast<F>(Isa::where_at_least(x, Isa::all(-126.0f), bits));
}

// tanh(x), relative error below 2e-7 also where x is small; NaN for NaN. With u = -2 |x| it is
// -m / (m + 2) of m = e^u - 1 = (2^n - 1) + 2^n (e^r - 1), u = n ln 2 + r.
QUIRE_INLINE F tanh_of(F x) {
    const I sign = reinterpret_cast<I>(x) & INT32_MIN, size = reinterpret_cast<I>(x) & INT32_MAX;
    const F u = reinterpret_cast<F>(size) * Isa::all(-2.0f);
    const F round = Isa::all(12582912.0f), one = Isa::all(1.0f);
    const F shifted = Isa::fma(u, Isa::all(1.44269504f), round);
    const F r = Isa::fma(shifted - round, Isa::all(-0.693147181f), u);
    F p = Isa::all(1.3882498e-3f);
    p = Isa::fma(p, r, Isa::all(8.3666472e-3f));
    p = Isa::fma(p, r, Isa::all(4.1667204e-2f));
    p = Isa::fma(p, r, Isa::all(1.6666542e-1f));
    p = Isa::fma(p, r, Isa::all(4.9999997e-1f));
    p = Isa::fma(p * r, r, r);
    const I exponent = reinterpret_cast<I>(shifted) << 23;
    const F power = reinterpret_cast<F>(reinterpret_cast<I>(one) + exponent);
    const F m = Isa::fma(power, p, power - one);
    const I near = Isa::where_at_least(u, Isa::all(-20.0f), I{} - 1);  // elsewhere it is 1
    const I found = reinterpret_cast<I>(m / (Isa::all(-2.0f) - m));
    const I is_nan = size > 0x7F800000;
    return reinterpret_cast<F>((found & near) | (reinterpret_cast<I>(one) & ~near) | sign | is_nan);
}

// Scores [low, high), which were divided by the cap, and those in the vectors around. Not part of
// the code around it, which is faster so where there is no cap.
__attribute__((noinline)) inline void cap_scores(float* scores, int64_t low, int64_t high, float cap) {
    const F all_cap = Isa::all(cap);
    for (int64_t t = low / kLanes * kLanes; t < high; t += kLanes) {
        Isa::store(scores + t, tanh_of(Isa::load(scores + t)) * all_cap);
    }
}

// Sixteen numbers become one, always by the same tree: i and i + 8, i and i + 4, ...
QUIRE_INLINE float largest(const F (&vectors)[kSumVectors]) {
    if constexpr (kSumVectors == 4) {
        return Isa::largest(Isa::max(Isa::max(vectors[0], vectors[2]), Isa::max(vectors[1], vectors[3])));
    } else if constexpr (kSumVectors == 2) {
        return Isa::largest(Isa::max(vectors[0], vectors[1]));
    } else {
        return Isa::largest(vectors[0]);
    }
}

QUIRE_INLINE float total(const F (&vectors)[kSumVectors]) {
    if constexpr (kSumVectors == 4) {
        return Isa::total((vectors[0] + vectors[2]) + (vectors[1] + vectors[3]));
    } else if constexpr (kSumVectors == 2) {
        return Isa::total(vectors[0] + vectors[1]);
    } else {
        return Isa::total(vectors[0]);
    }
}

// A query's softmax over some spans; acc: the weighted values.
struct State {
    float* peak;
    float* sum;
    float* acc;
};

// Scores [low, high) become weights; those in the vectors around become 0.
// NaN or an infinity among the scores makes the sum NaN, and so it stays.
template <class Kv>
void weigh_scores(float* scores, int64_t low, int64_t high, float& peak, float& sum) {
    const int64_t begin = low / kSumLanes * kSumLanes;
    const int64_t end = (high + kSumLanes - 1) / kSumLanes * kSumLanes;
    fill(scores + begin, scores + low, kLowest);
    fill(scores + high, scores + end, kLowest);
    F peaks[kSumVectors], sums[kSumVectors];
    unrolled<kSumVectors>(QUIRE_EACH(v) {
        peaks[v] = Isa::all(kLowest);
        sums[v] = F{};
    });
    for (int64_t t = begin; t < end; t += kSumLanes) {
        unrolled<kSumVectors>(QUIRE_EACH(v) {
            const F score = Isa::load(scores + t + v * kLanes);
            peaks[v] = Isa::max(score, peaks[v]);
            sums[v] = sums[v] + (score - score);
        });
    }
    const float top = largest(peaks);
    const F all_peaks = Isa::all(top);
    for (int64_t t = begin; t < end; t += kSumLanes) {
        unrolled<kSumVectors>(QUIRE_EACH(v) {
            const F score = Isa::load(scores + t + v * kLanes);
            const F weight = exp2_of<Kv::kDots>(score - all_peaks);
            Kv::store_weights(scores, t + v * kLanes, weight);
            sums[v] = sums[v] + weight;
        });
    }
    sum = total(sums);
    peak = sum == sum ? top : 0;
}

QUIRE_INLINE void clear(State state) {
    *state.peak = kEmptyPeak;
    *state.sum = 0;
}

inline void copy_state(State to, State from, int64_t size) {
    *to.peak = *from.peak;
    *to.sum = *from.sum;
    std::memcpy(to.acc, from.acc, static_cast<size_t>(size) * sizeof(float));
}

// Adds the later state `next` to `state`. size: a multiple of kLanes.
inline void fold(State state, State next, int64_t size) {
    if (*next.peak == kEmptyPeak) return;
    if (*state.peak == kEmptyPeak) return copy_state(state, next, size);
    const float peak = *state.peak > *next.peak ? *state.peak : *next.peak;
    const F before = exp2_of(Isa::all(*state.peak - peak));
    const F after = exp2_of(Isa::all(*next.peak - peak));
    for (int64_t h = 0; h < size; h += kLanes) {
        const F scaled = Isa::load(next.acc + h) * after;
        Isa::store(state.acc + h, Isa::fma(Isa::load(state.acc + h), before, scaled));
    }
    const float sum = *next.sum * after[0];
    *state.sum = *state.sum * before[0] + sum;
    *state.peak = peak;
}

// A logit without a value joins the sum of a state that has seen everything.
__attribute__((noinline)) inline void add_sink(State state, float sink) {
    const float above = static_cast<float>(sink * kLog2E) - *state.peak;
    const float weight = exp2_of(Isa::all(above > 0 ? -above : above))[0];
    *state.sum += above > 0 ? 1.0f / weight : above <= 0 ? weight : above;  // NaN stays
}

}  // namespace
}  // namespace quire
