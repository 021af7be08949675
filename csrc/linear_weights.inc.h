// Loading and adding one step along K, for each format: included by linear_tiles.inc.h.
#pragma once

namespace quire {
namespace {

constexpr int64_t kPanel = Isa::kVectors * Isa::kLanes;

#define QUIRE_INLINE inline __attribute__((always_inline))

// Calls body(0), body(1), ... with compile-time numbers. Arrays indexed by such numbers stay in
// registers. Arrays indexed by a loop's variable do not, even if the loop is unrolled later.
template <int kCount, class Body>
QUIRE_INLINE void unrolled(const Body& body) {
    if constexpr (kCount > 0) {
        unrolled<kCount - 1>(body);
        body(std::integral_constant<int, kCount - 1>{});
    }
}

#define QUIRE_EACH(index) [&](auto index) __attribute__((always_inline))

// The bits of a mask, from so many places higher.
template <int kBits>
QUIRE_INLINE typename Isa::I shifted(typename Isa::I words, int32_t mask) {
    return Isa::template shift_right<kBits>(words) & Isa::all(mask);
}

struct Float32Weight {
    using X = float;
    static constexpr int64_t kDepth = 1;  // inputs of a step, which has kPanel * 4 bytes
    static constexpr int64_t kVectorBytes = Isa::kLanes * 4;
    struct Loaded {
        typename Isa::F values;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) { return {Isa::load(w)}; }
    static QUIRE_INLINE void add(typename Isa::F& sum, const Loaded& w, const X* x) {
        sum = Isa::fma(w.values, Isa::all(x[0]), sum);
    }
};

struct Float16Weight {
    using X = float;
    static constexpr int64_t kDepth = 2, kVectorBytes = Isa::kLanes * 2;
    struct Loaded {
        typename Isa::F even, odd;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        return {Isa::load_halves(w), Isa::load_halves(w + kPanel * 2)};
    }
    template <int kHalf>
    static QUIRE_INLINE typename Isa::F load_half(const uint8_t* w) {
        return Isa::load_halves(w + kHalf * kPanel * 2);
    }
    static QUIRE_INLINE void add(typename Isa::F& sum, const Loaded& w, const X* x) {
        sum = Isa::fma(w.even, Isa::all(x[0]), sum);
        sum = Isa::fma(w.odd, Isa::all(x[1]), sum);
    }
};

// bfloat16 pairs as 32-bit words: their halves are floats after a shift and a mask.
struct WidenedBfloat16Weight {
    using X = float;
    static constexpr int64_t kDepth = 2, kVectorBytes = Isa::kLanes * 4;
    struct Loaded {
        typename Isa::F even, odd;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        const typename Isa::I words = Isa::load_words(w);
        return {Isa::low_halves(words), Isa::high_halves(words)};
    }
    template <int kHalf>
    static QUIRE_INLINE typename Isa::F load_half(const uint8_t* w) {
        const typename Isa::I words = Isa::load_words(w);
        if constexpr (kHalf == 0) return Isa::low_halves(words);
        else return Isa::high_halves(words);
    }
    static QUIRE_INLINE void add(typename Isa::F& sum, const Loaded& w, const X* x) {
        sum = Isa::fma(w.even, Isa::all(x[0]), sum);
        sum = Isa::fma(w.odd, Isa::all(x[1]), sum);
    }
};

#ifdef QUIRE_BFLOAT16_DOTS
struct Bfloat16Weight {
    using X = Bfloat16;
    static constexpr int64_t kDepth = 2, kVectorBytes = Isa::kLanes * 4;
    struct Loaded {
        typename Isa::I words;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) { return {Isa::load_words(w)}; }
    static QUIRE_INLINE void add(typename Isa::F& sum, const Loaded& w, const X* x) {
        sum = Isa::dot_bfloat16(sum, w.words, Isa::all_word(x));
    }
};
#else
using Bfloat16Weight = WidenedBfloat16Weight;
#endif

// Pairs of e4m3 inputs as float16 with the same exponent bits. Every number, also a subnormal one,
// is 2^8 too small; the scales make up for it (kFloat8Factor).

struct Float8Weight {
    using X = float;
    using Sum = typename Isa::F;
    static constexpr int64_t kDepth = 4, kWords = 1, kVectorBytes = Isa::kLanes * 2;
    struct Loaded {
        typename Isa::F values[4];
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        Loaded loaded;
        Isa::load_float8(w, loaded.values[0], loaded.values[1]);
        Isa::load_float8(w + kPanel * 2, loaded.values[2], loaded.values[3]);
        return loaded;
    }
    static QUIRE_INLINE void add(typename Isa::F& sum, const Loaded& w, const X* x) {
        unrolled<4>(QUIRE_EACH(i) { sum = Isa::fma(w.values[i], Isa::all(x[i]), sum); });
    }
};

// Integers, with int8 activations. kWords: of an output in a step; all but int8 are stored unsigned.
struct Int8Weight {
    using X = int8_t;
    using Sum = typename Isa::I;
    static constexpr int64_t kDepth = 4, kWords = 1, kVectorBytes = Isa::kLanes * 4;
    struct Loaded {
        typename Isa::I words;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) { return {Isa::load_words(w)}; }
    static QUIRE_INLINE void add(typename Isa::I& sum, const Loaded& w, const int8_t* x) {
        sum = Isa::dot_bytes(sum, w.words, Isa::all_word(x));
    }
    static constexpr int kOperands = 1;
    template <int>
    static QUIRE_INLINE typename Isa::I operand(const Loaded& w) {
        return w.words;
    }
};

struct Int4Weight {
    using X = int8_t;
    using Sum = typename Isa::I;
    static constexpr int64_t kDepth = 8, kWords = 1, kVectorBytes = Isa::kLanes * 4;
    struct Loaded {
        typename Isa::I low, high;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        const typename Isa::I words = Isa::load_words(w);
        return {Isa::low_nibbles(words), Isa::high_nibbles(words)};
    }
    static QUIRE_INLINE void add(typename Isa::I& sum, const Loaded& w, const int8_t* x) {
        sum = Isa::dot_nibbles(sum, w.low, Isa::all_word(x));
        sum = Isa::dot_nibbles(sum, w.high, Isa::all_word(x + 4));
    }
    static constexpr int kOperands = 2;
    template <int i>
    static QUIRE_INLINE typename Isa::I operand(const Loaded& w) {
        return i == 0 ? w.low : w.high;
    }
};

// MXFP4: halves of bytes are numbers of a table, doubled and plus kFloat4Bias.
struct Float4Weight : Int4Weight {
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                           12, 11, 10, 9,  8,  6,  4,  0};
        const Loaded codes = Int4Weight::load(w);
        return {Isa::look_up(kTable, codes.low), Isa::look_up(kTable, codes.high)};
    }
};

// 32 inputs in five words: operands 0 to 4 in the low bits, 5 to 7 in the high ones (linear_codes.h).
struct Int5Weight {
    using X = int8_t;
    using Sum = typename Isa::I;
    static constexpr int64_t kDepth = 32, kWords = 5, kVectorBytes = kWords * Isa::kLanes * 4;
    struct Loaded {
        typename Isa::I operands[8];
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        typename Isa::I words[5];
        unrolled<5>(QUIRE_EACH(i) { words[i] = Isa::load_words(w + i * Isa::kLanes * 4); });
        Loaded loaded;
        unrolled<5>(QUIRE_EACH(i) { loaded.operands[i] = words[i] & Isa::all(0x1F1F1F1F); });
        loaded.operands[5] = shifted<5>(words[0], 0x07070707) | shifted<2>(words[3], 0x18181818);
        loaded.operands[6] = shifted<5>(words[1], 0x07070707) | shifted<2>(words[4], 0x18181818);
        loaded.operands[7] = shifted<5>(words[2], 0x07070707) |
                             shifted<4>(words[3], 0x08080808) | shifted<3>(words[4], 0x10101010);
        return loaded;
    }
    static QUIRE_INLINE void add(typename Isa::I& sum, const Loaded& w, const int8_t* x) {
        unrolled<8>(QUIRE_EACH(i) {
            sum = Isa::dot_nibbles(sum, w.operands[i], Isa::all_word(x + 4 * i));
        });
    }
    static constexpr int kOperands = 8;
    template <int i>
    static QUIRE_INLINE typename Isa::I operand(const Loaded& w) {
        return w.operands[i];
    }
};

// 16 inputs in three words: operands 0 to 2 in the low bits, 3 in the high ones.
struct Int6Weight {
    using X = int8_t;
    using Sum = typename Isa::I;
    static constexpr int64_t kDepth = 16, kWords = 3, kVectorBytes = kWords * Isa::kLanes * 4;
    struct Loaded {
        typename Isa::I operands[4];
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) {
        typename Isa::I words[3];
        unrolled<3>(QUIRE_EACH(i) { words[i] = Isa::load_words(w + i * Isa::kLanes * 4); });
        Loaded loaded;
        unrolled<3>(QUIRE_EACH(i) { loaded.operands[i] = words[i] & Isa::all(0x3F3F3F3F); });
        loaded.operands[3] = shifted<6>(words[0], 0x03030303) |
                             shifted<4>(words[1], 0x0C0C0C0C) | shifted<2>(words[2], 0x30303030);
        return loaded;
    }
    static QUIRE_INLINE void add(typename Isa::I& sum, const Loaded& w, const int8_t* x) {
        unrolled<4>(QUIRE_EACH(i) {
            sum = Isa::dot_nibbles(sum, w.operands[i], Isa::all_word(x + 4 * i));
        });
    }
    static constexpr int kOperands = 4;
    template <int i>
    static QUIRE_INLINE typename Isa::I operand(const Loaded& w) {
        return w.operands[i];
    }
};

// By how values are stored, where they have groups.
template <Values kValues>
struct WeightOf;
template <>
struct WeightOf<Values::kFloat8> { using Type = Float8Weight; };
template <>
struct WeightOf<Values::kFloat4> { using Type = Float4Weight; };
template <>
struct WeightOf<Values::kInt4> { using Type = Int4Weight; };
template <>
struct WeightOf<Values::kInt5> { using Type = Int5Weight; };
template <>
struct WeightOf<Values::kInt6> { using Type = Int6Weight; };
template <>
struct WeightOf<Values::kInt8> { using Type = Int8Weight; };

// Whether a vector's part of a step fills so many registers that vectors take turns.
template <class Weight>
constexpr bool kTakesTurns = Weight::kDepth >= 16;

// Whether tiles multiply the first weights of all pairs, then the second ones.
template <class Weight>
constexpr bool kSplits = false;
template <>
constexpr bool kSplits<Float16Weight> = Isa::kSplitsPairs;
template <>
constexpr bool kSplits<WidenedBfloat16Weight> = Isa::kSplitsPairs;

}  // namespace
}  // namespace quire
