// The multiplication, written once for all variants. Each instruction set's source file includes it
// after it has defined `Isa`, the set's vectors and operations. All of it is in an unnamed
// namespace, so that variants never share code.
//
// A tile is up to kTileRows rows times some vectors of outputs, summed in registers. Tiles of a
// chunk of K follow one another while that chunk of the panel is in the L2 cache. Between chunks
// the sums are stored in memory, which changes no bit of them.
//
// QUIRE_OTHER_FORMATS: the kernels of a lesser variant, for a variant that differs from it in bfloat16
// alone (QUIRE_BFLOAT16_DOTS) or in integers alone. They multiply all other formats, so that the
// same code is not compiled twice.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "elements.h"
#include "linear.h"
#include "linear_weights.inc.h"

#include "linear_factors.inc.h"
#include "linear_operand.inc.h"

namespace quire {
namespace {

static_assert(Isa::kVectors == kPanelVectors);
constexpr int64_t kAheadBytes = 8192;  // measured: 4096 and 16384 are slower
// The same for weights without groups. Where a tile passes a panel twice, the hardware does not prefetch
// the half of the lines that a pass reads.
constexpr int64_t kNearBytes = Isa::kWideRows < Isa::kTileRows ? kAheadBytes : 0;
constexpr int64_t kBlockRows = 120;          // most rows that go through all panels together
constexpr int64_t kFetchRows = 10;  // rows from which on the next panel is fetched ahead
constexpr int64_t kCachedBytes = 8 * 1024 * 1024;  // of results
constexpr int64_t kChunkBytes = 256 * 1024;  // of a panel: half of a small L2 cache

// --- tiles ---

// Memory to prefetch while a tile computes: cache lines [begin, end) of each step, `distance` bytes
// later. From kFetchRows on that is the same step of the next panel. The tiles share its lines, so
// that it arrives while they compute. With fewer rows the hardware prefetches as well, if values
// are contiguous. If factors stand between them, one tile prefetches kAheadBytes ahead.
struct Ahead {
    int64_t distance, begin, end;

    QUIRE_INLINE void fetch(const uint8_t* step) const {
        for (int64_t line = begin; line < end; ++line) {
            __builtin_prefetch(step + distance + line * 64, 0, 2);
        }
    }
};

// Makes the compiler finish a sum here and leave it in its register.
template <class F>
QUIRE_INLINE void finish(F& sum) {
#ifdef QUIRE_X86_VARIANTS
    asm volatile("" : "+x"(sum));
#endif
}

// The same as add_step, with a half of all pairs at a time: registers hold 12 sums, two weights and an
// activation. Unless each sum is finished in turn, compilers load more and store sums in between.
template <class Weight, int kRows, int kVectors, class Sum, class X>
QUIRE_INLINE void add_halves(Sum (&sums)[kRows][kVectors], const uint8_t* w,
                             const X* const (&x)[kRows], int64_t at) {
    unrolled<2>(QUIRE_EACH(half) {
        Sum loaded[kVectors];
        unrolled<kVectors>(QUIRE_EACH(v) {
            loaded[v] = Weight::template load_half<half>(w + v * Weight::kVectorBytes);
        });
        unrolled<kRows>(QUIRE_EACH(r) {
            const Sum each = Isa::all(x[r][at + half]);
            unrolled<kVectors>(
                QUIRE_EACH(v) { sums[r][v] = Isa::fma(loaded[v], each, sums[r][v]); });
            unrolled<kVectors>(QUIRE_EACH(v) { finish(sums[r][v]); });
        });
    });
}

// sums[r][v] += the products of a step, of which `w` is the first vector's part.
template <class Weight, int kRows, int kVectors, class Sum, class X>
QUIRE_INLINE void add_step(Sum (&sums)[kRows][kVectors], const uint8_t* w, const X* const (&x)[kRows],
                           int64_t at) {
    if constexpr (kSplits<Weight> && kVectors < Isa::kVectors) {
        return add_halves<Weight, kRows, kVectors>(sums, w, x, at);
    }
    if constexpr (kTakesTurns<Weight> || kSplits<Weight>) {
        unrolled<kVectors>(QUIRE_EACH(v) {
            const typename Weight::Loaded loaded = Weight::load(w + v * Weight::kVectorBytes);
            unrolled<kRows>(QUIRE_EACH(r) { Weight::add(sums[r][v], loaded, x[r] + at); });
        });
        return;
    }
    typename Weight::Loaded loaded[kVectors];
    unrolled<kVectors>(QUIRE_EACH(v) { loaded[v] = Weight::load(w + v * Weight::kVectorBytes); });
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(QUIRE_EACH(v) { Weight::add(sums[r][v], loaded[v], x[r] + at); });
    });
}

// Stored sums of a panel, with `stride` between rows.
struct Sums {
    float* at;
    int64_t stride;

    QUIRE_INLINE Sums from(int64_t row, int64_t lane) const {
        return {at + row * stride + lane, stride};
    }
};

// The products of `steps` steps, of kRows rows and kVectors vectors of outputs, are added to acc, or
// replace what it holds.
template <class Weight, bool kFetches, int kRows, int kVectors>
void dense_tile(const Sums& acc, const uint8_t* x, int64_t stride, const uint8_t* w, int64_t steps,
                const Ahead& ahead, bool is_first) {
    using X = typename Weight::X;
    typename Isa::F sums[kRows][kVectors];
    const X* rows[kRows];
    unrolled<kRows>(QUIRE_EACH(r) {
        rows[r] = reinterpret_cast<const X*>(x + r * stride);
        unrolled<kVectors>(QUIRE_EACH(v) {
            const float* place = acc.at + r * acc.stride + v * Isa::kLanes;
            sums[r][v] = is_first ? Isa::zero() : Isa::load(place);
        });
    });
    for (int64_t s = 0; s < steps; ++s, w += kPanel * 4) {
        if constexpr (kFetches) ahead.fetch(w);
        add_step<Weight, kRows, kVectors>(sums, w, rows, s * Weight::kDepth);
    }
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(
            QUIRE_EACH(v) { Isa::store(acc.at + r * acc.stride + v * Isa::kLanes, sums[r][v]); });
    });
}

// Some groups of a panel: of a row's num_groups, `groups` from `first` on, each of `inputs` inputs. Of
// each group are done `steps` steps from `step` on. bias: what was added to integers.
struct Groups {
    int64_t num_groups, first, groups, inputs, step, steps;
    int32_t bias;
};

// Returns a row's activations of group g.
template <class X>
QUIRE_INLINE const X* group_of(const Operand& x, int64_t row, int64_t g, int64_t inputs) {
    return reinterpret_cast<const X*>(x.values + row * x.stride) + g * inputs;
}

// Returns a group's initial sum: 0, or minus the contribution of the bias.
template <class Weight>
QUIRE_INLINE typename Weight::Sum first_sum(const Operand& x, int64_t at, int32_t bias) {
    if constexpr (std::is_same_v<typename Weight::X, int8_t>) {
        return Isa::all(bias == 0 ? 0 : x.sums[at]);
    }
    return typename Weight::Sum{};
}

// total + a group's sum times its scale, and times the activations' where these are int8.
template <class Weight>
QUIRE_INLINE typename Isa::F add_sum(typename Isa::F total, typename Weight::Sum sum,
                                     typename Isa::F scale, const Operand& x, int64_t at) {
    if constexpr (std::is_same_v<typename Weight::X, int8_t>) {
        return Isa::fma(Isa::to_float(sum), Isa::times(scale, Isa::all(x.scales[at])), total);
    } else {
        return Isa::fma(sum, scale, total);
    }
}

// One over the factor in an operand's sums, exactly: where there are offsets a bias is a power of two.
QUIRE_INLINE float inverse_factor(int32_t bias) {
    return 1.0f / static_cast<float>(sum_factor(bias));
}

// total + a group's offset times what its activations add up to.
QUIRE_INLINE typename Isa::F add_offset(typename Isa::F total, typename Isa::F offset,
                                        const Operand& x, int64_t at, int32_t bias) {
    const float sum = static_cast<float>(x.sums[at]) * inverse_factor(bias);
    return Isa::fma(offset, Isa::all(x.scales[at] * sum), total);
}

// The same of groups: sums within a group, integers where activations are int8, then what they come to
// is added in float32. w: the first group's block, which it begins.
template <class Weight, bool kOffsets, bool kFetches, int kRows, int kVectors>
void grouped_tile(const Sums& acc, const Operand& x, int64_t row, const Groups& part,
                  const PanelLayout& layout, const PlainFactors& factors, int64_t lane,
                  const uint8_t* w, const Ahead& ahead) {
    using X = typename Weight::X;
    constexpr int64_t kStepBytes = Weight::kWords * kPanel * 4;
    int64_t left = layout.block_groups;  // of the block
    w += layout.factor_bytes + part.step * kStepBytes;
    for (int64_t i = 0; i < part.groups; ++i) {
        const int64_t g = part.first + i, at = row * part.num_groups + g;
        typename Weight::Sum sums[kRows][kVectors];
        const X* rows[kRows];
        unrolled<kRows>(QUIRE_EACH(r) {
            rows[r] = group_of<X>(x, row + r, g, part.inputs) + part.step * Weight::kDepth;
            const auto start = first_sum<Weight>(x, at + r * part.num_groups, part.bias);
            unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = start; });
        });
        const uint8_t* step = w;
        w += layout.group_bytes;
        if (--left == 0) {
            w += layout.factor_bytes;
            left = layout.block_groups;
        }
        for (int64_t s = 0; s < part.steps; ++s, step += kStepBytes) {
            if constexpr (kFetches) {
                unrolled<Weight::kWords>(QUIRE_EACH(n) { ahead.fetch(step + n * kPanel * 4); });
            }
            add_step<Weight, kRows, kVectors>(sums, step, rows, s * Weight::kDepth);
        }
        const bool is_first = g == 0 && part.step == 0;
        unrolled<kVectors>(QUIRE_EACH(v) {
            const int64_t from = i * kPanel + lane + v * Isa::kLanes;
            const typename Isa::F scale = Isa::load(factors.scales + from);
            unrolled<kRows>(QUIRE_EACH(r) {
                const int64_t own = at + r * part.num_groups;
                float* place = acc.at + r * acc.stride + v * Isa::kLanes;
                typename Isa::F total = is_first ? Isa::zero() : Isa::load(place);
                total = add_sum<Weight>(total, sums[r][v], scale, x, own);
                if constexpr (kOffsets) {
                    const typename Isa::F offset = Isa::load(factors.offsets + from);
                    total = add_offset(total, offset, x, own, part.bias);
                }
                Isa::store(place, total);
            });
        });
    }
}

// A whole panel for one row, with the bits of the tiles: its factors go by the registers. Memory
// is read in one stream.
template <WeightFormat kFormat>
void grouped_row(const Sums& acc, const Groups& all, const PanelLayout& layout, const Operand& x,
                 int64_t row, const uint8_t* block) {
    using Own = Factors<kFormat>;
    using Weight = typename WeightOf<Own::kParts.values>::Type;
    using X = typename Weight::X;
    constexpr int kVectors = Isa::kVectors;
    constexpr int64_t kStepBytes = Weight::kWords * kPanel * 4;
    typename Isa::F totals[kVectors], outer[kVectors][2];
    unrolled<kVectors>(QUIRE_EACH(v) { totals[v] = Isa::zero(); });
    const int64_t whole = all.inputs / Weight::kDepth;
    for (int64_t g = 0; g < all.num_groups; block += layout.block_bytes) {
        prefetch_lines<Own::kHeaderBytes>(block + kAheadBytes);
        unrolled<kVectors>(
            QUIRE_EACH(v) { load_headers<Own>(outer[v], block, v * Isa::kLanes); });
        const uint8_t *factors = block + Own::kHeaderBytes, *step = block + layout.factor_bytes;
        for (int64_t j = 0; j < layout.block_groups; ++j, ++g, factors += Own::kGroupBytes) {
            prefetch_lines<Own::kGroupBytes>(factors + kAheadBytes);
            const int64_t at = row * all.num_groups + g;
            const X* rows[1] = {group_of<X>(x, row, g, all.inputs)};
            for (int64_t done = 0; done < whole; done += all.steps) {
                const int64_t end = done + all.steps < whole ? done + all.steps : whole;
                typename Weight::Sum sums[1][kVectors];
                const auto start = first_sum<Weight>(x, at, all.bias);
                unrolled<kVectors>(QUIRE_EACH(v) { sums[0][v] = start; });
                for (int64_t s = done; s < end; ++s, step += kStepBytes) {
                    prefetch_lines<kStepBytes>(step + kAheadBytes);
                    add_step<Weight, 1, kVectors>(sums, step, rows, s * Weight::kDepth);
                }
                unrolled<kVectors>(QUIRE_EACH(v) {
                    constexpr int64_t lane = v * Isa::kLanes;
                    const auto scale = Own::scales(factors + lane * Own::kScaleBytes, outer[v][0]);
                    totals[v] = add_sum<Weight>(totals[v], sums[0][v], scale, x, at);
                    if constexpr (Own::kHasOffsets) {
                        const uint8_t* from = factors + kPanel * Own::kScaleBytes;
                        const auto offset =
                            Own::offsets(from + lane * Own::kOffsetBytes, scale, outer[v][1]);
                        totals[v] = add_offset(totals[v], offset, x, at, all.bias);
                    }
                });
            }
        }
    }
    unrolled<kVectors>(QUIRE_EACH(v) { Isa::store(acc.at + v * Isa::kLanes, totals[v]); });
}

// --- a panel for all rows ---

// The tile of `rows` rows: all vectors at once if they are few, else half of them at a time.
template <class Tile, int kRows>
QUIRE_INLINE void tile_of(const Tile& tile) {
    if constexpr (kRows <= Tile::kWideRows) {
        tile.template run<kRows, Isa::kVectors>(0);
    } else {
        constexpr int kNarrow = Isa::kVectors / 2;
        tile.template run<kRows, kNarrow>(0);
        tile.template run<kRows, kNarrow>(kNarrow);
    }
}

// Tiles are of nearly equal size: where there are several, none has fewer rows than half of the most.
static_assert(kFetchRows > Isa::kTileRows);

template <class Tile, int kRows = Isa::kTileRows>
void run_tile(const Tile& tile, int64_t rows) {
    if constexpr (kRows > Tile::kMinRows) {
        if (rows < kRows) return run_tile<Tile, kRows - 1>(tile, rows);
    }
    tile_of<Tile, kRows>(tile);
}

template <class Weight, bool kFetches>
struct DenseTile {
    static constexpr int kMinRows = kFetches && kNearBytes == 0 ? Isa::kTileRows / 2 : 1;
    static constexpr int kWideRows = kSplits<Weight> ? 2 : Isa::kWideRows;
    Sums acc;
    const uint8_t* x;
    int64_t stride;
    const uint8_t* w;
    int64_t steps;
    bool is_first;
    Ahead ahead;

    template <int kRows, int kVectors>
    void run(int vector) const {
        dense_tile<Weight, kFetches, kRows, kVectors>(
            acc.from(0, vector * Isa::kLanes), x, stride,
            w + vector * Weight::kVectorBytes, steps, ahead, is_first);
    }
};

template <class Weight, bool kOffsets>
struct Grouped {
    template <class, bool kFetches>
    struct Tile {
        static constexpr int kMinRows = kFetches ? 2 : Isa::kTileRows / 2;
        static constexpr int kWideRows = kTakesTurns<Weight> ? 3 : Isa::kWideRows;
        Sums acc;
        const Operand* x;
        int64_t row;
        Groups part;
        const PanelLayout* layout;
        const PlainFactors* factors;
        const uint8_t* w;
        Ahead ahead;

        template <int kRows, int kVectors>
        void run(int vector) const {
            const int64_t lane = vector * Isa::kLanes;
            grouped_tile<Weight, kOffsets, kFetches, kRows, kVectors>(
                acc.from(0, lane), *x, row, part, *layout, *factors, lane,
                w + vector * Weight::kVectorBytes, ahead);
        }
    };
};

// Calls tile(first row, rows, what to fetch, begin of the chunk) for tiles of nearly equal size. near: how
// far ahead the first one of few rows asks; 0 if it does not.
template <class Call>
void for_tiles(int64_t rows, int64_t panel_bytes, int64_t near, const Call& call, int64_t chunk) {
    constexpr int64_t kLines = kPanel * 4 / 64;  // of a step
    const int64_t tiles = (rows + Isa::kTileRows - 1) / Isa::kTileRows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = t * rows / tiles;
        Ahead ahead{panel_bytes, t * kLines / tiles, (t + 1) * kLines / tiles};
        if (rows < kFetchRows) ahead = {near, 0, near > 0 && t == 0 ? kLines : 0};
        call(first, (t + 1) * rows / tiles - first, ahead, chunk);
    }
}

// Runs a tile that asks for the next panel, or one without the code for it.
template <template <class, bool> class Tile, class Weight, class... Fields>
void run_tile_of(int64_t rows, const Ahead& ahead, const Fields&... fields) {
    if (ahead.end > ahead.begin) {
        run_tile(Tile<Weight, true>{fields..., ahead}, rows);
    } else {
        run_tile(Tile<Weight, false>{fields..., ahead}, rows);
    }
}

template <class Weight>
void dense_panel(const Sums& acc, const Sums&, const PackedWeight& weight, const PanelLayout& layout,
                 const Operand& x, int64_t row, int64_t rows, const uint8_t* w) {
    const int64_t steps = (weight.inputs + Weight::kDepth - 1) / Weight::kDepth;
    // Few rows pass half of the first cache at a time, so that second passes find it there.
    const int64_t bytes = kNearBytes > 0 && rows < kFetchRows ? kChunkBytes / 16 : kChunkBytes;
    const int64_t chunk = bytes / (kPanel * 4);
    constexpr int64_t kStepBytes = Weight::kDepth * sizeof(typename Weight::X);
    const auto tile = [&](int64_t first, int64_t count, const Ahead& ahead, int64_t s) {
        const uint8_t* values = x.values + (row + first) * x.stride + s * kStepBytes;
        const int64_t some = steps - s < chunk ? steps - s : chunk;
        run_tile_of<DenseTile, Weight>(count, ahead, acc.from(first, 0), values, x.stride,
                                       w + s * kPanel * 4, some, s == 0);
    };
    for (int64_t s = 0; s < steps; s += chunk) for_tiles(rows, layout.bytes, kNearBytes, tile, s);
}

// Groups whose factors are decoded together: whole blocks, and few where rows are few, so that memory
// is read nearly in one stream.
int64_t chunk_groups(const PanelLayout& layout, int64_t rows) {
    const int64_t max_bytes = rows < kFetchRows ? kAheadBytes : kChunkBytes;
    const int64_t fitting = max_bytes / layout.block_bytes * layout.block_groups;
    return fitting < 1 ? layout.block_groups : fitting < kFactorGroups ? fitting : kFactorGroups;
}

}  // namespace
}  // namespace quire

#include "linear_multiples.inc.h"
#ifdef QUIRE_HALF_TILES
#include "linear_half_tiles.inc.h"
#endif

namespace quire {
namespace {

template <WeightFormat kFormat>
void grouped_panel(const Sums& acc, [[maybe_unused]] const Sums& last, const PackedWeight& weight,
                   const PanelLayout& layout, const Operand& x, int64_t row, int64_t rows,
                   const uint8_t* w) {
    using Weight = typename WeightOf<parts_of(kFormat).values>::Type;
    constexpr bool kOffsets = Factors<kFormat>::kHasOffsets;
    const int64_t steps = weight.group / Weight::kDepth;
    // A group larger than a chunk is parted, unless its sums are integers, which are exact.
    const bool is_parted = layout.group_bytes > kChunkBytes && !weight.rounds_activations();
    const int64_t max_bytes = is_parted ? kChunkBytes / (Weight::kWords * kPanel * 4) : steps;
    const int32_t bias = stored_bias(weight);
    if (rows == 1) {
        const Groups all{layout.groups, 0, layout.groups, weight.group, 0, max_bytes, bias};
        return grouped_row<kFormat>(acc, all, layout, x, row, w);
    }
#ifdef QUIRE_HALF_TILES
    if constexpr (parts_of(kFormat).values != Values::kFloat8) {
        if (takes_half_tiles(rows)) {
            return half_panel<kFormat>(acc, last, weight, layout, x, row, rows, w);
        }
    }
#endif
    PlainFactors factors;
    const int64_t chunk = chunk_groups(layout, rows);
    const int64_t ahead_bytes = rows < kFetchRows ? kAheadBytes : layout.bytes;
    for (int64_t g = 0; g < layout.groups; g += chunk) {
        const int64_t count = layout.groups - g < chunk ? layout.groups - g : chunk;
        const uint8_t* block = w + layout.block(g);
        decode_factors<kFormat>(factors, layout, block, count, ahead_bytes);
        const auto tile = [&](int64_t first, int64_t some, const Ahead& ahead, int64_t step) {
            const int64_t end = step + max_bytes < steps ? step + max_bytes : steps;
            const Groups part{layout.groups, g, count, weight.group, step, end - step, bias};
            run_tile_of<Grouped<Weight, kOffsets>::template Tile, Weight>(
                some, ahead, acc.from(first, 0), &x, row + first, part, &layout, &factors, block);
        };
        for (int64_t step = 0; step < steps; step += max_bytes) {
            for_tiles(rows, layout.bytes, kAheadBytes, tile, step);
        }
    }
}

template <class T>
void write_rows(const MutableMatrix& out, const void* bias, const float* acc, int64_t row, int64_t rows,
                int64_t output) {
    const int64_t left = out.columns - output, count = left < kPanel ? left : kPanel;
    const T* offsets = bias == nullptr ? nullptr : static_cast<const T*>(bias) + output;
    for (int64_t r = 0; r < rows; ++r, acc += kPanel) {
        T* to = static_cast<T*>(out.data) + (row + r) * out.stride + output;
        if (offsets == nullptr) {
            for (int64_t i = 0; i < count; ++i) narrow(to[i], acc[i]);
        } else {
            for (int64_t i = 0; i < count; ++i) narrow(to[i], acc[i] + widen(offsets[i]));
        }
    }
}

// Products of a panel. acc: where sums wait; last: where complete ones go, which is acc as well unless
// weights have no groups or `ends_in_results`.
using PanelFunction = void (*)(const Sums&, const Sums&, const PackedWeight&, const PanelLayout&,
                               const Operand&, int64_t, int64_t, const uint8_t*);

template <WeightFormat kFormat>
void multiples_panel(const Sums& acc, [[maybe_unused]] const Sums& last,
                     [[maybe_unused]] const PackedWeight& weight, const PanelLayout& layout,
                     const Operand& x, int64_t row, int64_t rows, const uint8_t* w) {
#ifdef QUIRE_HALF_TILES
    if (takes_half_tiles(rows)) {
        return half_panel<kFormat>(acc, last, weight, layout, x, row, rows, w);
    }
#endif
    multiplied_panel(acc, layout, x, row, rows, w);
}

// Returns whether the code for a format is this variant's own.
constexpr bool is_own([[maybe_unused]] WeightFormat format) {
#if !defined(QUIRE_OTHER_FORMATS)
    return true;
#elif defined(QUIRE_BFLOAT16_DOTS)
    return format == WeightFormat::kBfloat16;
#else
    return rounds_activations(format);
#endif
}

// Null if the format is not the variant's own.
template <WeightFormat kFormat>
constexpr PanelFunction panel_function_of() {
    if constexpr (!is_own(kFormat)) return nullptr;
    else if constexpr (kFormat == WeightFormat::kFloat32) return dense_panel<Float32Weight>;
    else if constexpr (kFormat == WeightFormat::kBfloat16) return dense_panel<Bfloat16Weight>;
    else if constexpr (kFormat == WeightFormat::kFloat16) return dense_panel<Float16Weight>;
    else if constexpr (kFormat == WeightFormat::kInt4Multiples) return multiples_panel<kFormat>;
    else return grouped_panel<kFormat>;
}

template <int... kFormats>
PanelFunction panel_function(WeightFormat format, std::integer_sequence<int, kFormats...>) {
    constexpr PanelFunction kAll[] = {panel_function_of<static_cast<WeightFormat>(kFormats)>()...};
    return kAll[static_cast<int>(format)];
}

PanelFunction panel_function(const PackedWeight& weight) {
    constexpr int kCount = static_cast<int>(WeightFormat::kCount);
    return panel_function(weight.format, std::make_integer_sequence<int, kCount>{});
}

bool ends_in_results([[maybe_unused]] const PackedWeight& weight, [[maybe_unused]] int64_t rows) {
#ifdef QUIRE_HALF_TILES
    return weight.rounds_activations() && takes_half_tiles(rows);
#else
    return false;
#endif
}

void multiply(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
              const Operand& x, int64_t begin, int64_t end) {
#ifdef QUIRE_OTHER_FORMATS
    if (!is_own(weight.format)) {
        return QUIRE_OTHER_FORMATS.multiply(out, bias, weight, x, begin, end);
    }
#endif
    alignas(64) float acc[kBlockRows * kPanel];
    const PanelFunction panel_of = panel_function(weight);
    PanelLayout layout(weight);
    const int64_t panel_bytes = layout.bytes;
    auto* results = static_cast<float*>(out.data);  // if they are float32
    const bool are_few = x.rows * out.stride * 4 <= kCachedBytes;
    // The activations of a block stay in the second cache while panels pass. A panel is read again for
    // each block, which is less than to read all activations for each panel.
    const int64_t blocks = (x.rows + kBlockRows - 1) / kBlockRows;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = b * x.rows / blocks, rows = (b + 1) * x.rows / blocks - row;
        for (int64_t p = begin; p < end; ++p) {
            const uint8_t* w = weight.data + p * panel_bytes;
            // Tiles compute the prefetch distance from layout.bytes.
            const bool is_last = p + 1 == end && b + 1 == blocks && weight.next != nullptr;
            layout.bytes = is_last ? weight.next - w : panel_bytes;
            // Sums are kept in the results themselves if these are float32 and as wide as a panel.
            // Then one tile's stores wait for memory while the next one computes. Grouped formats
            // only store their final sums there, and only if the caches can hold all results. Half
            // tiles store too little of a row at a time.
            const bool is_wide = out.element == Element::kFloat32 && (p + 1) * kPanel <= out.columns;
            const bool ends = is_wide && bias == nullptr &&
                              (!weight.has_groups() || (are_few && ends_in_results(weight, rows)));
            const Sums local{acc, kPanel};
            const Sums last = ends ? Sums{results + row * out.stride + p * kPanel, out.stride} : local;
            panel_of(weight.has_groups() ? local : last, last, weight, layout, x, row, rows, w);
            if (ends) continue;
            switch (out.element) {
                case Element::kFloat32:
                    write_rows<float>(out, bias, acc, row, rows, p * kPanel);
                    break;
                case Element::kBfloat16:
                    write_rows<Bfloat16>(out, bias, acc, row, rows, p * kPanel);
                    break;
                default: write_rows<Float16>(out, bias, acc, row, rows, p * kPanel);
            }
        }
    }
}

// --- the limit of the arithmetic, for benchmarks ---

// Steps of the largest tile on the same few cache lines. Returns the operations of a step.
template <class Weight, class X, class Sum>
int64_t repeat_step(int64_t steps, const Sum& zero) {
    constexpr int kRows = Isa::kTileRows;
    constexpr int kVectors = kRows <= Isa::kWideRows ? Isa::kVectors : Isa::kVectors / 2;
    alignas(64) static const uint8_t zeros[kPanel * 4] = {};
    const uint8_t* w = zeros;
    asm volatile("" : "+r"(w));  // or the compiler sees that all weights are the same
    Sum sums[kRows][kVectors];
    const X* rows[kRows];
    unrolled<kRows>(QUIRE_EACH(r) {
        rows[r] = reinterpret_cast<const X*>(zeros);
        asm volatile("" : "+r"(rows[r]));  // nor that all rows are
        unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = zero; });
    });
    for (int64_t s = 0; s < steps; ++s) {
        add_step<Weight, kRows, kVectors>(sums, w, rows, 0);
        asm volatile("" ::: "memory");
    }
    volatile uint8_t unused[sizeof sums];
    std::memcpy(const_cast<uint8_t*>(unused), sums, sizeof sums);
    return 2 * kRows * kVectors * Isa::kLanes * Weight::kDepth;
}

// The same of a format's weights, if the format is the variant's own.
template <WeightFormat kFormat, class Weight, class Sum>
int64_t repeat_own(int64_t steps, const Sum& zero) {
    if constexpr (!is_own(kFormat)) return 0;
    else return repeat_step<Weight, typename Weight::X>(steps, zero);
}

int64_t repeat(WeightFormat format, int64_t steps) {
#ifdef QUIRE_OTHER_FORMATS
    if (!is_own(format)) return QUIRE_OTHER_FORMATS.repeat(format, steps);
#endif
    using Format = WeightFormat;
    switch (parts_of(format).values) {
        case Values::kFloat32: return repeat_own<Format::kFloat32, Float32Weight>(steps, Isa::zero());
        case Values::kBfloat16: return repeat_own<Format::kBfloat16, Bfloat16Weight>(steps, Isa::zero());
        case Values::kFloat16: return repeat_own<Format::kFloat16, Float16Weight>(steps, Isa::zero());
        case Values::kInt8: return repeat_own<Format::kInt8, Int8Weight>(steps, Isa::all(0));
        default: return repeat_own<Format::kInt4, Int4Weight>(steps, Isa::all(0));
    }
}

constexpr LinearKernels kKernels{Isa::kName,    kPanel,  Isa::kInt8Offset,
                                 operand_bytes, prepare, multiply, repeat};

}  // namespace
}  // namespace quire
