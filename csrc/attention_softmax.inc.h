// The softmax of a span's scores, and how spans are folded: included by attention_tiles.inc.h.
#pragma once

namespace quire {
namespace {

#define QUIRE_INLINE inline __attribute__((always_inline))
#define QUIRE_EACH(index) [&](auto index) __attribute__((always_inline))

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


// exp(x) for x <= 0, relative error below 2e-7; 0 below -87 and for NaN. It is 2^n * p(r) with
// r = x - n ln 2: adding 1.5 * 2^23 rounds to n and leaves it in the lowest bits.
QUIRE_INLINE F exp_of(F x) {
    const F round = Isa::all(12582912.0f);
    const F shifted = Isa::fma(x, Isa::all(1.44269504f), round);
    const F r = Isa::fma(shifted - round, Isa::all(-0.693147181f), x);
    F p = Isa::all(8.2903103e-3f);
    p = Isa::fma(p, r, Isa::all(4.1897930e-2f));
    p = Isa::fma(p, r, Isa::all(1.6667636e-1f));
    p = Isa::fma(p, r, Isa::all(4.9999151e-1f));
    p = Isa::fma(p, r, Isa::all(9.9999970e-1f));
    p = Isa::fma(p, r, Isa::all(1.0f));
    const I bits = reinterpret_cast<I>(p) + (reinterpret_cast<I>(shifted) << 23);
    return reinterpret_cast<F>(Isa::where_at_least(x, Isa::all(-87.0f), bits));
}

// tanh(x), relative error below 2e-7 also where x is small; NaN for NaN. With u = -2 |x| it is
// -m / (m + 2) of m = e^u - 1 = (2^n - 1) + 2^n (e^r - 1), n and r as above.
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

inline float exp_of_one(float x) {
    float lanes[kLanes];
    Isa::store(lanes, exp_of(Isa::all(x)));
    return lanes[0];
}

// Sixteen numbers become one, always by the same tree.
template <class Join>
QUIRE_INLINE float join_lanes(const F (&vectors)[kSumVectors], const Join& join) {
    float lanes[kSumLanes];
    unrolled<kSumVectors>(QUIRE_EACH(v) { Isa::store(lanes + v * kLanes, vectors[v]); });
    for (int64_t half = kSumLanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) lanes[i] = join(lanes[i], lanes[i + half]);
    }
    return lanes[0];
}

// A query's softmax over some spans; acc: the weighted values.
struct State {
    float* peak;
    float* sum;
    float* acc;
};

// Scores [low, high) become weights; those in the vectors around become 0.
// NaN or an infinity among the scores makes the sum NaN, and so it stays.
inline void weigh_scores(float* scores, int64_t low, int64_t high, float& peak, float& sum) {
    const int64_t begin = low / kSumLanes * kSumLanes;
    const int64_t end = (high + kSumLanes - 1) / kSumLanes * kSumLanes;
    fill(scores + begin, scores + low, kLowest);
    fill(scores + high, scores + end, kLowest);
    F peaks[kSumVectors], sums[kSumVectors];
    I wrong[kSumVectors];
    unrolled<kSumVectors>(QUIRE_EACH(v) {
        peaks[v] = Isa::all(kLowest);
        sums[v] = F{};
        wrong[v] = I{};
    });
    for (int64_t t = begin; t < end; t += kSumLanes) {
        unrolled<kSumVectors>(QUIRE_EACH(v) {
            const F score = Isa::load(scores + t + v * kLanes);
            peaks[v] = Isa::max(score, peaks[v]);
            wrong[v] |= reinterpret_cast<I>(score - score);
        });
    }
    peak = join_lanes(peaks, [](float a, float b) { return a > b ? a : b; });
    const F all_peaks = Isa::all(peak);
    for (int64_t t = begin; t < end; t += kSumLanes) {
        unrolled<kSumVectors>(QUIRE_EACH(v) {
            float* place = scores + t + v * kLanes;
            const F weight = exp_of(Isa::load(place) - all_peaks);
            Isa::store(place, weight);
            sums[v] = sums[v] + weight;
        });
    }
    sum = join_lanes(sums, [](float a, float b) { return a + b; });
    int32_t any = 0;
    unrolled<kSumVectors>(QUIRE_EACH(v) {
        for (int64_t i = 0; i < kLanes; ++i) any |= wrong[v][i];
    });
    if (any != 0) {
        peak = 0;
        sum = __builtin_nanf("");
    }
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

// What `next` holds, which comes later, is added to `state`. size: a multiple of kLanes.
inline void fold(State state, State next, int64_t size) {
    if (*next.peak == kEmptyPeak) return;
    if (*state.peak == kEmptyPeak) return copy_state(state, next, size);
    const float peak = *state.peak > *next.peak ? *state.peak : *next.peak;
    const float before = exp_of_one(*state.peak - peak), after = exp_of_one(*next.peak - peak);
    const F all_before = Isa::all(before), all_after = Isa::all(after);
    for (int64_t h = 0; h < size; h += kLanes) {
        const F scaled = Isa::load(next.acc + h) * all_after;
        Isa::store(state.acc + h, Isa::fma(Isa::load(state.acc + h), all_before, scaled));
    }
    const float sum = *next.sum * after;
    *state.sum = *state.sum * before + sum;
    *state.peak = peak;
}

// A logit without a value joins the sum of a state that has seen everything.
__attribute__((noinline)) inline void add_sink(State state, float sink) {
    const float above = sink - *state.peak, weight = exp_of_one(above > 0 ? -above : above);
    *state.sum += above > 0 ? 1.0f / weight : above <= 0 ? weight : above;  // NaN stays
}

}  // namespace
}  // namespace quire
