// Tiles of half of a panel's vectors, for some numbers of rows and instruction sets with 32
// registers: included by linear_tiles.inc.h. They leave registers for the totals of a tile's
// groups. To load and store the totals at each group's end costs half as much as the products of a
// small group.
#pragma once

#include "linear_unpack.inc.h"

namespace quire {
namespace {

constexpr int kHalfVectors = Isa::kVectors / 2;

constexpr int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns whether these tiles are faster than tiles of all vectors. If one tile has all rows,
// memory limits the speed, and one stream reads it fastest.
constexpr bool takes_half_tiles(int64_t rows) { return rows > Isa::kTileRows; }

// Some groups of a panel: of a row's num_groups, `groups` from `first` on, each of `inputs` inputs. Before
// each block_groups of them, but the first, stand `gap` bytes. bias: what was added to integers.
struct HalfGroups {
    int64_t num_groups, first, groups, inputs, block_groups, gap;
    const float *scales, *offsets;  // [groups, kPanel], of PlainFactors
    int32_t bias;
};

// Memory to prefetch while a tile computes: `step` bytes, at most a cache line, with each step of a
// group, and then `rest`.
struct Stream {
    const uint8_t* next;
    int64_t step, rest;

    QUIRE_INLINE void prefetch_next() {
        __builtin_prefetch(next, 0, 2);
        next += step;
    }
};

// Pointers to the rows of a tile: row r of an array stands `stride` bytes after row r - 1. There
// are two pointers instead of one for each row, since the compiler would spill further pointers to
// vectors.
template <int kRows>
struct RowPointers {
    const uint8_t *low, *high;
    int64_t stride;

    QUIRE_INLINE RowPointers(const void* first, int64_t bytes)
        : low(static_cast<const uint8_t*>(first)), high(low + kRows / 2 * bytes), stride(bytes) {}
    template <int r>
    QUIRE_INLINE const uint8_t* at() const {
        if constexpr (r < kRows / 2) return low + r * stride;
        return high + (r - kRows / 2) * stride;
    }
    QUIRE_INLINE void move(int64_t bytes) {
        low += bytes;
        high += bytes;
        asm("" : "+r"(low), "+r"(high));  // or they become one for each row again
    }
};

// The format that a tile reads. Formats that are slow to decode are unpacked first, once for all
// rows.
template <class Weight>
using HalfWeight = std::conditional_t<kTakesTurns<Weight>, Int8Weight, Weight>;

// The start and end of a group's sums; formats that share it share the code. biased: whether sums
// begin with the correction of the bias. rounds: whether activations' scales are rounded.
template <class W, bool biased, bool offsets, bool rounds>
struct HalfSums {
    using Weight = W;
    static constexpr bool kIsBiased = biased, kHasOffsets = offsets, kRoundsScales = rounds;
};

template <WeightFormat kFormat>
struct HalfSumsOf {
    static constexpr FormatParts kParts = parts_of(kFormat);
    static constexpr bool kIsInt8 = kParts.values == Values::kInt8;
    static constexpr int32_t kBias = kIsInt8 ? Isa::kInt8Offset : kParts.bias;
    using Type = HalfSums<HalfWeight<typename WeightOf<kParts.values>::Type>, kBias != 0,
                          kParts.offsets != Offsets::kNone, rounds_scales(kFormat)>;
};

// sums += the products of a step.
template <class Weight, int kRows>
QUIRE_INLINE void add_half_step(typename Isa::I (&sums)[kRows][kHalfVectors], const uint8_t* w,
                                const RowPointers<kRows>& values) {
    typename Weight::Loaded loaded[kHalfVectors];
    unrolled<kHalfVectors>(
        QUIRE_EACH(v) { loaded[v] = Weight::load(w + v * Weight::kVectorBytes); });
    unrolled<Weight::kOperands>(QUIRE_EACH(i) {
        unrolled<kRows>(QUIRE_EACH(r) {
            const typename Isa::I inputs = Isa::all_word(values.template at<r>() + 4 * i);
            unrolled<kHalfVectors>(QUIRE_EACH(v) {
                sums[r][v] = Isa::dot_bytes(sums[r][v], Weight::template operand<i>(loaded[v]), inputs);
            });
        });
    });
}

// A tile's weights in the layout of a panel. w: the first group's weights. Each group has steps of
// a word, and prefetches the next panel before each step.
template <class Weight>
struct PackedHalf {
    const uint8_t* w;
    int64_t block_groups, gap, left;

    PackedHalf(const uint8_t* first, const HalfGroups& part)
        : w(first), block_groups(part.block_groups), gap(part.gap), left(part.block_groups) {}
    template <int kRows>
    QUIRE_INLINE void add(typename Isa::I (&sums)[kRows][kHalfVectors], RowPointers<kRows>& values,
                          int64_t inputs, Stream& stream) {
        for (int64_t s = inputs / Weight::kDepth; s > 0; --s) {
            stream.prefetch_next();
            add_half_step<Weight, kRows>(sums, w, values);
            w += Weight::kWords * kPanel * 4;
            values.move(Weight::kDepth);
        }
        if (--left == 0) {
            w += gap;
            left = block_groups;
        }
    }
};

// The same of integers with multiples, whose products are also stored as int8 stand, for the next tiles.
struct MultipliedHalf {
    using Weight = MultiplesWeight;
    const uint8_t *w, *factors;
    uint8_t* to;
    int64_t group_bytes;

    template <int kRows>
    QUIRE_INLINE void add(typename Isa::I (&sums)[kRows][kHalfVectors], RowPointers<kRows>& values,
                          int64_t, Stream& stream) {
        const uint8_t* words = w;
        for (int64_t part = 0; part < kMultipleParts; ++part) {
            typename Isa::Multiples multiples[kHalfVectors];
            unrolled<kHalfVectors>(QUIRE_EACH(v) {
                multiples[v] = Weight::multiples(factors + v * Isa::kLanes * 4, part);
            });
#pragma GCC unroll 1
            for (int64_t i = 0; i < Weight::kWords; ++i) {
                add_word<kRows>(sums, values, words + i * Isa::kLanes * 4, multiples, stream);
            }
            words += Weight::kWords * kPanel * 4;
        }
        w += group_bytes;
        factors += group_bytes;
    }

   private:
    template <int kRows>
    QUIRE_INLINE void add_word(typename Isa::I (&sums)[kRows][kHalfVectors],
                               RowPointers<kRows>& values, const uint8_t* words,
                               const typename Isa::Multiples (&multiples)[kHalfVectors],
                               Stream& stream) {
        typename Isa::I own[kHalfVectors];
        unrolled<kHalfVectors>(
            QUIRE_EACH(v) { own[v] = Isa::load_words(words + v * Weight::kVectorBytes); });
        unrolled<2>(QUIRE_EACH(half) {
            stream.prefetch_next();
            typename Isa::I operands[kHalfVectors];
            unrolled<kHalfVectors>(QUIRE_EACH(v) {
                operands[v] = Isa::multiplied(own[v], multiples[v]);
                own[v] = Isa::template shift_right<4>(own[v]);
                Isa::store_words(to + v * Int8Weight::kVectorBytes, operands[v]);
            });
            unrolled<kRows>(QUIRE_EACH(r) {
                const typename Isa::I inputs = Isa::all_word(values.template at<r>() + 4 * half);
                unrolled<kHalfVectors>(
                    QUIRE_EACH(v) { sums[r][v] = Isa::dot_bytes(sums[r][v], operands[v], inputs); });
            });
            to += kPanel * 4;
        });
        values.move(8);
    }
};

// Returns the initial sums of one row of a group.
template <class Kind>
QUIRE_INLINE typename Isa::I half_start(const uint8_t* row_sum) {
    if constexpr (Kind::kIsBiased) return Isa::all_word(row_sum);
    return Isa::all(0);
}

// Scales of weights, which stand in PlainFactors, times one of activations, with the bits of `times`.
template <class Kind>
QUIRE_INLINE typename Isa::F times_scale(const float* own, float scale) {
    if constexpr (!Kind::kRoundsScales) return Isa::times(Isa::load(own), Isa::all(scale));
    constexpr int64_t kRaised = offsetof(PlainFactors, raised) - offsetof(PlainFactors, scales);
    const int64_t is_raised = (bits_of(scale) & kScaleBit) / kScaleBit;
    const auto* from = reinterpret_cast<const uint8_t*>(own) + is_raised * kRaised;
    return Isa::times_power(Isa::load(from), Isa::all(scale));
}

// totals += what the sums of a group come to, with the bits of add_sum and add_offset. The offsets stand
// `offsets` numbers behind the scales of its outputs; inverse: one over the factor in row_sums.
template <class Kind, int kRows>
QUIRE_INLINE void add_groups(typename Isa::F (&totals)[kRows][kHalfVectors],
                             const typename Isa::I (&sums)[kRows][kHalfVectors],
                             const RowPointers<kRows>& row_scales, const RowPointers<kRows>& row_sums,
                             const float* scales, int64_t offsets, float inverse) {
    unrolled<kRows>(QUIRE_EACH(r) {
        float scale;
        int32_t sum;
        std::memcpy(&scale, row_scales.template at<r>(), sizeof scale);
        std::memcpy(&sum, row_sums.template at<r>(), sizeof sum);
        unrolled<kHalfVectors>(QUIRE_EACH(v) {
            const float* from = scales + v * Isa::kLanes;
            const typename Isa::F both = times_scale<Kind>(from, scale);
            totals[r][v] = Isa::fma(Isa::to_float(sums[r][v]), both, totals[r][v]);
            if constexpr (Kind::kHasOffsets) {
                const typename Isa::F times = Isa::all(scale * (static_cast<float>(sum) * inverse));
                totals[r][v] = Isa::fma(Isa::load(from + offsets), times, totals[r][v]);
            }
        });
    });
}

// Multiplies a tile. acc: the totals so far of half of the vectors, unless these are a row's first
// groups; to: the new totals. The arguments are copied here, a word at a time. A compiler's copy
// reads wider than it writes, so it waits until all stores of the tile before are in the cache.
template <class Kind, int kRows, class Half>
void half_tile(const Sums& acc, const Sums& to, const Operand& x, int64_t row, const HalfGroups& part,
               int64_t lane, const Half& weights, const Stream& stream_in) {
    Half half = weights;
    Stream stream = stream_in;
    typename Isa::F totals[kRows][kHalfVectors];
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kHalfVectors>(QUIRE_EACH(v) {
            const float* from = acc.at + r * acc.stride + v * Isa::kLanes;
            totals[r][v] = part.first == 0 ? Isa::zero() : Isa::load(from);
        });
    });
    const int64_t own = row * part.num_groups + part.first;
    RowPointers<kRows> values(x.values + row * x.stride + part.first * part.inputs, x.stride);
    RowPointers<kRows> scales(x.scales + own, part.num_groups * 4);
    RowPointers<kRows> row_sums(x.sums + own, part.num_groups * 4);
    const float* factors = part.scales + lane;
    const int64_t offsets = part.offsets - part.scales;
    const float inverse = inverse_factor(part.bias);
    for (int64_t g = part.groups; g > 0; --g) {
        typename Isa::I sums[kRows][kHalfVectors];
        unrolled<kRows>(QUIRE_EACH(r) {
            const typename Isa::I start = half_start<Kind>(row_sums.template at<r>());
            unrolled<kHalfVectors>(QUIRE_EACH(v) { sums[r][v] = start; });
        });
        half.template add<kRows>(sums, values, part.inputs, stream);
        for (int64_t at = 0; at < stream.rest; at += 64, stream.next += 64) {
            __builtin_prefetch(stream.next, 0, 2);
        }
        add_groups<Kind>(totals, sums, scales, row_sums, factors, offsets, inverse);
        factors += kPanel;
        scales.move(4);
        row_sums.move(4);
    }
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kHalfVectors>(
            QUIRE_EACH(v) { Isa::store(to.at + r * to.stride + v * Isa::kLanes, totals[r][v]); });
    });
}

template <class Kind, class Half>
void half_tile(int64_t rows, const Sums& acc, const Sums& to, const Operand& x, int64_t row,
               const HalfGroups& part, int64_t lane, const Half& half, const Stream& stream) {
    switch (rows) {
        case 3: return half_tile<Kind, 3>(acc, to, x, row, part, lane, half, stream);
        case 4: return half_tile<Kind, 4>(acc, to, x, row, part, lane, half, stream);
        case 5: return half_tile<Kind, 5>(acc, to, x, row, part, lane, half, stream);
        default: return half_tile<Kind, 6>(acc, to, x, row, part, lane, half, stream);
    }
}

constexpr int64_t kUnpackedBytes = 32 * 1024;

// All tiles of some groups. half_of(vector, is_first): a tile's weights from that vector on; is_first:
// whether it is the first tile to read them. next: of `next_bytes` that will be read later each tile asks
// memory for a part while it computes.
template <class Kind, class HalfOf>
void half_tiles(const Sums& acc, const Sums& to, const Operand& x, int64_t row, int64_t rows,
                const HalfGroups& part, const HalfOf& half_of, const uint8_t* next, int64_t next_bytes) {
    static_assert(Isa::kTileRows == 6);  // so, from 7 rows on, a tile has 3 to 6
    using Weight = typename Kind::Weight;
    const int64_t tiles = (rows + Isa::kTileRows - 1) / Isa::kTileRows, units = 2 * tiles;
    const int64_t steps = part.inputs / Weight::kDepth;
    const int64_t own_bytes = up(next_bytes / part.groups, units), even = up(own_bytes, steps);
    const int64_t step = even < 64 ? even : 64, rest = own_bytes - steps * step;
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t tile = unit / 2, vector = unit % 2 * kHalfVectors, lane = vector * Isa::kLanes;
        const int64_t first = tile * rows / tiles, end = (tile + 1) * rows / tiles;
        const Stream stream{next + unit * (next_bytes / units), step, rest};
        half_of(vector, tile == 0, [&](const auto& half) {
            half_tile<Kind>(end - first, acc.from(first, lane), to.from(first, lane), x, row + first,
                            part, lane, half, stream);
        });
    }
}

// A panel for `rows` rows from `row` on. last: where sums go that are complete.
template <WeightFormat kFormat>
void half_panel(const Sums& acc, const Sums& last, const PackedWeight& weight, const PanelLayout& layout,
                const Operand& x, int64_t row, int64_t rows, const uint8_t* w) {
    using Stored = typename WeightOf<parts_of(kFormat).values>::Type;
    using Kind = typename HalfSumsOf<kFormat>::Type;
    constexpr bool kUnpacks = kTakesTurns<Stored>;
    const int64_t max_groups = chunk_groups(layout, rows > kFetchRows ? rows : kFetchRows);
    const int64_t unpacked = kUnpackedBytes / (layout.block_groups * weight.group * kPanel);
    const int64_t fitting = unpacked * layout.block_groups;
    const int64_t chunk = kUnpacks && fitting < max_groups ? fitting : max_groups;
    PlainFactors factors;
    alignas(64) uint8_t bytes[kUnpacks ? kUnpackedBytes : 64];
    for (int64_t g = 0; g < layout.groups; g += chunk) {
        const int64_t count = layout.groups - g < chunk ? layout.groups - g : chunk;
        const uint8_t* block = w + layout.block(g);
        decode_factors<kFormat, Kind::kRoundsScales>(factors, layout, block, count, layout.bytes);
        HalfGroups part{layout.groups,        g,
                        count,                weight.group,
                        layout.block_groups,  layout.factor_bytes,
                        factors.scales,       factors.offsets,
                        stored_bias(weight)};
        const int64_t next_bytes = count / layout.block_groups * layout.block_bytes;
        const uint8_t* values = block + layout.factor_bytes;
        if constexpr (kUnpacks) {
            if constexpr (!kHasMultiples<Stored>) {
                unpack_bytes<Stored>(bytes, layout, block, count, weight.group / Stored::kDepth,
                                     [](auto codes) { return codes; });
            }
            values = bytes;
            part.gap = 0;
        }
        const auto half_of = [&](int64_t vector, bool is_first, const auto& run) {
            using Weight = typename Kind::Weight;
            if constexpr (kHasMultiples<Stored>) {
                const uint8_t* own = block + layout.factor_bytes + vector * Stored::kVectorBytes;
                const MultipliedHalf half{own, block + vector * Isa::kLanes * 4,
                                          bytes + vector * Weight::kVectorBytes, layout.block_bytes};
                if (is_first) return run(half);
            }
            run(PackedHalf<Weight>(values + vector * Weight::kVectorBytes, part));
        };
        const Sums& to = g + count == layout.groups ? last : acc;
        half_tiles<Kind>(acc, to, x, row, rows, part, half_of, block + layout.bytes, next_bytes);
    }
}

}  // namespace
}  // namespace quire
