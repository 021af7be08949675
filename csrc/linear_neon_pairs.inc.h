// Tiles of smmla and bfmmla, which multiply 2 outputs by 2 rows over 8 bytes of inputs. One
// instruction does 32 products of bytes or 16 of bfloat16, twice as many as a dot. The panels have
// the layout of the dots: two shuffles join neighbouring words for all rows of a tile.
//
//   two steps of a panel          o0 o1 o2 o3   and   o0' o1' o2' o3'     (32-bit words)
//   two matrices                  o0 o0' o1 o1' and   o2 o2' o3 o3'
//   times rows r, s               r r' s s'       (of int4, whose words hold 8 inputs, twice)
//   are sums                      o0r o0s o1r o1s and o2r o2s o3r o3s
//
// An odd row is its own partner.
#pragma once

#include "linear_tiles.inc.h"
#include "linear_unpack.inc.h"

namespace quire {
namespace {

constexpr int kPairRows = 6;                     // rows of a tile: 24 registers of sums
constexpr int kMatrices = kPanel / 2;            // of 2 outputs
constexpr int64_t kDoubleStep = 2 * kPanel * 4;  // bytes

struct Int8Pairs {
    using Sum = int32x4_t;
    static constexpr int64_t kRowBytes = 8;  // of activations in a double step
    struct Rows {
        int32x4_t values;
    };
    static QUIRE_INLINE Rows load(const uint8_t* r, const uint8_t* s) {
        return {vreinterpretq_s32_u8(vcombine_u8(vld1_u8(r), vld1_u8(s)))};
    }
    static QUIRE_INLINE void add(Sum& sum, int32x4_t w, const Rows& x) {
        sum = vmmlaq_s32(sum, Isa::bytes(w), Isa::bytes(x.values));
    }
};

struct Int4Pairs {
    using Sum = int32x4_t;
    static constexpr int64_t kRowBytes = 16;
    struct Rows {
        int32x4_t low, high;  // what the low and the high halves of weights are multiplied by
    };
    static QUIRE_INLINE Rows load(const uint8_t* r, const uint8_t* s) {
        const int32x4_t first = Isa::load_words(r), second = Isa::load_words(s);
        return {vuzp1q_s32(first, second), vuzp2q_s32(first, second)};
    }
    static QUIRE_INLINE void add(Sum& sum, int32x4_t w, const Rows& x) {
        sum = vmmlaq_s32(sum, Isa::bytes(Isa::low_nibbles(w)), Isa::bytes(x.low));
        sum = vmmlaq_s32(sum, Isa::bytes(Isa::high_nibbles(w)), Isa::bytes(x.high));
    }
};

struct Bfloat16Pairs {
    using Sum = float32x4_t;
    static constexpr int64_t kRowBytes = 8;
    using Rows = Int8Pairs::Rows;
    static QUIRE_INLINE Rows load(const uint8_t* r, const uint8_t* s) {
        return Int8Pairs::load(r, s);
    }
    static QUIRE_INLINE void add(Sum& sum, int32x4_t w, const Rows& x) {
        sum = vbfmmlaq_f32(sum, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(x.values));
    }
};

// sums of a tile: [pairs][kMatrices]. Adds the products of 4 outputs.
template <class Weight, int kPairs>
QUIRE_INLINE void add_words(typename Weight::Sum (&sums)[kPairs][kMatrices], int at, int32x4_t even,
                            int32x4_t odd, const typename Weight::Rows (&x)[kPairs]) {
    const int32x4_t lower = vzip1q_s32(even, odd), upper = vzip2q_s32(even, odd);
    unrolled<kPairs>(QUIRE_EACH(p) {
        Weight::add(sums[p][at], lower, x[p]);
        Weight::add(sums[p][at + 1], upper, x[p]);
    });
}

template <class Weight, int kPairs>
QUIRE_INLINE void add_double_step(typename Weight::Sum (&sums)[kPairs][kMatrices], const uint8_t* w,
                                  const uint8_t* const (&rows)[2 * kPairs], int64_t at) {
    typename Weight::Rows x[kPairs];
    unrolled<kPairs>(
        QUIRE_EACH(p) { x[p] = Weight::load(rows[2 * p] + at, rows[2 * p + 1] + at); });
    unrolled<Isa::kVectors>(QUIRE_EACH(v) {
        const uint8_t* words = w + v * 16;
        add_words<Weight, kPairs>(sums, 2 * v, Isa::load_words(words),
                                  Isa::load_words(words + kPanel * 4), x);
    });
}

// The last inputs of an odd number of words, with zeros for the missing ones.
template <int kPairs>
QUIRE_INLINE void add_last_word(float32x4_t (&sums)[kPairs][kMatrices], const uint8_t* w,
                                const uint8_t* const (&rows)[2 * kPairs], int64_t at) {
    Int8Pairs::Rows x[kPairs];
    unrolled<kPairs>(QUIRE_EACH(p) {
        int32_t words[4] = {};
        std::memcpy(words, rows[2 * p] + at, 4);
        std::memcpy(words + 2, rows[2 * p + 1] + at, 4);
        x[p] = {vld1q_s32(words)};
    });
    unrolled<Isa::kVectors>(QUIRE_EACH(v) {
        add_words<Bfloat16Pairs, kPairs>(sums, 2 * v, Isa::load_words(w + v * 16), Isa::all(0), x);
    });
}

// The row in each half of each pair.
template <int kRows>
QUIRE_INLINE void pair_rows(const uint8_t* (&rows)[(kRows + 1) / 2 * 2], const uint8_t* x,
                            int64_t stride) {
    unrolled<(kRows + 1) / 2 * 2>(
        QUIRE_EACH(r) { rows[r] = x + (r < kRows ? r : kRows - 1) * stride; });
}

// Multiplies `words` words of bfloat16 inputs; the arguments are as in dense_tile.
template <int kRows>
void dense_pairs(float* acc, const uint8_t* x, int64_t stride, const uint8_t* w, int64_t words,
                 bool is_first) {
    constexpr int kPairs = (kRows + 1) / 2;
    const uint8_t* rows[2 * kPairs];
    pair_rows<kRows>(rows, x, stride);
    float32x4_t sums[kPairs][kMatrices];
    unrolled<kPairs * Isa::kVectors>(QUIRE_EACH(i) {
        constexpr int p = i / Isa::kVectors, v = i % Isa::kVectors;
        constexpr int second = 2 * p + 1 < kRows ? kPanel : 0;
        const float* place = acc + 2 * p * kPanel + v * Isa::kLanes;
        const float32x4_t r = is_first ? Isa::zero() : Isa::load(place);
        const float32x4_t s = is_first ? Isa::zero() : Isa::load(place + second);
        sums[p][2 * v] = vzip1q_f32(r, s);
        sums[p][2 * v + 1] = vzip2q_f32(r, s);
    });
    int64_t at = 0;
    for (int64_t s = 0; s < words / 2; ++s, at += Bfloat16Pairs::kRowBytes, w += kDoubleStep) {
        add_double_step<Bfloat16Pairs, kPairs>(sums, w, rows, at);
    }
    if (words % 2 != 0) add_last_word<kPairs>(sums, w, rows, at);
    unrolled<kRows * Isa::kVectors>(QUIRE_EACH(i) {
        constexpr int r = i / Isa::kVectors, v = i % Isa::kVectors;
        const auto& pair = sums[r / 2];
        Isa::store(acc + r * kPanel + v * Isa::kLanes,
                   r % 2 == 0 ? vuzp1q_f32(pair[2 * v], pair[2 * v + 1])
                              : vuzp2q_f32(pair[2 * v], pair[2 * v + 1]));
    });
}

// Adds decoded group `i` to acc, as grouped_tile does. at: its index in the first row's scales.
template <class Weight, bool kOffsets, int kRows>
QUIRE_INLINE void add_group(float* acc, const Operand& x, int64_t at, const Groups& part,
                            const PlainFactors& factors, int64_t i,
                            const int32x4_t (&sums)[(kRows + 1) / 2][kMatrices]) {
    unrolled<Isa::kVectors>(QUIRE_EACH(v) {
        const int64_t from = i * kPanel + v * Isa::kLanes;
        const float32x4_t scale = Isa::load(factors.scales + from);
        unrolled<kRows>(QUIRE_EACH(r) {
            const auto& pair = sums[r / 2];
            const int32x4_t sum = r % 2 == 0 ? vuzp1q_s32(pair[2 * v], pair[2 * v + 1])
                                             : vuzp2q_s32(pair[2 * v], pair[2 * v + 1]);
            const int64_t own = at + r * part.num_groups;
            float* place = acc + r * kPanel + v * Isa::kLanes;
            float32x4_t total = part.first + i == 0 ? Isa::zero() : Isa::load(place);
            total = add_sum<Int8Weight>(total, sum, scale, x, own);
            if constexpr (kOffsets) {
                const float32x4_t offset = Isa::load(factors.offsets + from);
                total = add_offset(total, offset, x, own, part.bias);
            }
            Isa::store(place, total);
        });
    });
}

// The arguments are as in grouped_tile, but part.steps are double steps.
template <class Weight, bool kOffsets, int kRows>
void grouped_pairs(float* acc, const Operand& x, int64_t row, const Groups& part,
                   const PanelLayout& layout, const PlainFactors& factors, const uint8_t* w) {
    constexpr int kPairs = (kRows + 1) / 2;
    for (int64_t i = 0; i < part.groups; ++i) {
        const int64_t g = part.first + i, at = row * part.num_groups + g;
        const uint8_t* rows[2 * kPairs];
        pair_rows<kRows>(rows, x.values + row * x.stride + g * part.inputs, x.stride);
        int32x4_t sums[kPairs][kMatrices];
        unrolled<kPairs>(QUIRE_EACH(p) {
            constexpr int second = 2 * p + 1 < kRows ? 2 * p + 1 : 2 * p;
            const int32x4_t r = first_sum<Int8Weight>(x, at + 2 * p * part.num_groups, part.bias);
            const int32x4_t s = first_sum<Int8Weight>(x, at + second * part.num_groups, part.bias);
            const int32x4_t start = vzip1q_s32(r, s);
            unrolled<kMatrices>(QUIRE_EACH(m) { sums[p][m] = start; });
        });
        const uint8_t* step = w + layout.values(i);
        for (int64_t s = 0; s < part.steps; ++s, step += kDoubleStep) {
            add_double_step<Weight, kPairs>(sums, step, rows, s * Weight::kRowBytes);
        }
        add_group<Weight, kOffsets, kRows>(acc, x, at, part, factors, i, sums);
    }
}

// --- a panel for all rows ---

// Calls tile(first row, rows as a constant) for tiles of nearly equal numbers of pairs.
template <class Tile>
void for_pair_tiles(int64_t rows, const Tile& tile) {
    const int64_t pairs = (rows + 1) / 2, tiles = (rows + kPairRows - 1) / kPairRows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = t * pairs / tiles * 2, end = (t + 1) * pairs / tiles * 2;
        switch ((end < rows ? end : rows) - first) {
            case 1: tile(first, std::integral_constant<int, 1>{}); break;
            case 2: tile(first, std::integral_constant<int, 2>{}); break;
            case 3: tile(first, std::integral_constant<int, 3>{}); break;
            case 4: tile(first, std::integral_constant<int, 4>{}); break;
            case 5: tile(first, std::integral_constant<int, 5>{}); break;
            default: tile(first, std::integral_constant<int, kPairRows>{});
        }
    }
}

void dense_pairs_panel(float* acc, const PackedWeight& weight, const PanelLayout&, const Operand& x,
                       int64_t row, int64_t rows, const uint8_t* w) {
    constexpr int64_t kChunk = kChunkBytes / kDoubleStep * 2;
    const int64_t words = (weight.inputs + 1) / 2;
    for (int64_t s = 0; s < words; s += kChunk) {
        const int64_t some = words - s < kChunk ? words - s : kChunk;
        for_pair_tiles(rows, [&](int64_t first, auto count) {
            const uint8_t* values = x.values + (row + first) * x.stride + s * 4;
            dense_pairs<count>(acc + first * kPanel, values, x.stride, w + s * kPanel * 4, some,
                               s == 0);
        });
    }
}

template <class Weight, WeightFormat kFormat>
void grouped_pairs_panel(float* acc, const PackedWeight& weight, const PanelLayout& layout,
                         const Operand& x, int64_t row, int64_t rows, const uint8_t* w) {
    constexpr bool kOffsets = Factors<kFormat>::kHasOffsets;
    const int64_t steps = weight.group / Weight::kRowBytes, chunk = chunk_groups(layout, rows);
    PlainFactors factors;
    for (int64_t g = 0; g < layout.groups; g += chunk) {
        const int64_t count = layout.groups - g < chunk ? layout.groups - g : chunk;
        const uint8_t* block = w + layout.block(g);
        decode_factors<kFormat>(factors, layout, block, count, layout.bytes);
        const Groups part{layout.groups, g, count, weight.group, 0, steps, stored_bias(weight)};
        for_pair_tiles(rows, [&](int64_t first, auto some) {
            grouped_pairs<Weight, kOffsets, some>(acc + first * kPanel, x, row + first, part, layout,
                                                  factors, block);
        });
    }
}

// The same of integers with multiples, which become int8 first, once for all rows.
void multiplied_pairs_panel(float* acc, const PackedWeight& weight, const PanelLayout& layout,
                            const Operand& x, int64_t row, int64_t rows, const uint8_t* w) {
    constexpr WeightFormat kFormat = WeightFormat::kInt4Multiples;
    constexpr int64_t kGroupBytes = kMultipliedInputs * kPanel, kGroups = 8;
    PanelLayout bytes_layout = layout;
    bytes_layout.factor_bytes = 0;
    bytes_layout.group_bytes = bytes_layout.block_bytes = kGroupBytes;
    PlainFactors factors;
    alignas(64) uint8_t bytes[kGroups * kGroupBytes];
    const int64_t steps = kMultipliedInputs / Int8Pairs::kRowBytes;
    for (int64_t g = 0; g < layout.groups; g += kGroups) {
        const int64_t count = layout.groups - g < kGroups ? layout.groups - g : kGroups;
        const uint8_t* block = w + layout.block(g);
        decode_factors<kFormat>(factors, layout, block, count, layout.bytes);
        unpack_bytes<MultiplesWeight>(bytes, layout, block, count, kMultipleParts,
                                      [](auto products) { return products; });
        const Groups part{layout.groups, g, count, kMultipliedInputs, 0, steps, stored_bias(weight)};
        for_pair_tiles(rows, [&](int64_t first, auto some) {
            grouped_pairs<Int8Pairs, false, some>(acc + first * kPanel, x, row + first, part,
                                                  bytes_layout, factors, bytes);
        });
    }
}

// --- the limit of the arithmetic, for benchmarks ---

// Double steps of the largest tile on the same few cache lines. Returns the operations of a step.
template <class Weight>
int64_t repeat_pairs(int64_t steps) {
    constexpr int kPairs = kPairRows / 2;
    alignas(64) static const uint8_t zeros[kDoubleStep] = {};
    const uint8_t* w = zeros;
    const uint8_t* rows[2 * kPairs];
    asm volatile("" : "+r"(w));  // or the compiler sees that all weights are the same
    unrolled<2 * kPairs>(QUIRE_EACH(r) {
        rows[r] = zeros;
        asm volatile("" : "+r"(rows[r]));
    });
    typename Weight::Sum sums[kPairs][kMatrices] = {};
    for (int64_t s = 0; s < steps; ++s) {
        add_double_step<Weight, kPairs>(sums, w, rows, 0);
        asm volatile("" ::: "memory");
    }
    volatile uint8_t unused[sizeof sums];
    std::memcpy(const_cast<uint8_t*>(unused), sums, sizeof sums);
    constexpr int64_t kDepth = Weight::kRowBytes / (std::is_same_v<Weight, Bfloat16Pairs> ? 2 : 1);
    return 2 * kPairRows * kPanel * kDepth;
}

}  // namespace
}  // namespace quire
