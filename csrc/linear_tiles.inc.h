// The multiplication, once for all variants: included by one source file per instruction set after
// that has defined `Isa`, the vectors of that set and what they can do. All of it is in an unnamed
// namespace, so that no variant's code is ever shared with another's.
//
// A tile is up to kTileRows rows times some vectors of outputs, summed in registers. Tiles of a chunk
// of K follow one another while that chunk of the panel is in the L2 cache; between chunks the sums
// wait in memory, which changes no bit of them.
#pragma once

#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"
#include "linear_weights.inc.h"

#include "linear_factors.inc.h"
#include "linear_operand.inc.h"

namespace quire {
namespace {

constexpr int64_t kBlockRows = 120;          // rows whose sums wait together
constexpr int64_t kFetchRows = 10;  // rows from which on the next panel is fetched ahead
constexpr int64_t kChunkBytes = 256 * 1024;  // of a panel: half of a small L2 cache

// --- tiles ---

// What a tile asks memory for while it computes: of each step the cache lines [begin, end),
// `distance` bytes on, which is the same step of the next panel. From kFetchRows on the tiles share
// the next panel's lines, so that it arrives while they compute. With fewer the hardware does better: asking
// was measured to cost one row of int8 40 % and eight rows 20 %.
struct Ahead {
    int64_t distance, begin, end;

    QUIRE_INLINE void fetch(const uint8_t* step) const {
        for (int64_t line = begin; line < end; ++line) {
            __builtin_prefetch(step + distance + line * 64, 0, 2);
        }
    }
};

// sums[r][v] += the products of a step, of which `w` is the first vector's part.
template <class Weight, int kRows, int kVectors, class Sum, class X>
QUIRE_INLINE void add_step(Sum (&sums)[kRows][kVectors], const uint8_t* w, const X* const (&x)[kRows],
                           int64_t at) {
    if constexpr (kTakesTurns<Weight>) {
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

// The products of `steps` steps, of kRows rows and kVectors vectors of outputs, are added to acc, or
// replace what it holds. acc: [rows, kPanel], where sums wait.
template <class Weight, bool kFetches, int kRows, int kVectors>
void dense_tile(float* acc, const uint8_t* x, int64_t stride, const uint8_t* w, int64_t steps,
                const Ahead& ahead, bool is_first) {
    using X = typename Weight::X;
    typename Isa::F sums[kRows][kVectors];
    const X* rows[kRows];
    unrolled<kRows>(QUIRE_EACH(r) {
        rows[r] = reinterpret_cast<const X*>(x + r * stride);
        unrolled<kVectors>(QUIRE_EACH(v) {
            sums[r][v] = is_first ? Isa::zero() : Isa::load(acc + r * kPanel + v * Isa::kLanes);
        });
    });
    for (int64_t s = 0; s < steps; ++s, w += kPanel * 4) {
        if constexpr (kFetches) ahead.fetch(w);
        add_step<Weight, kRows, kVectors>(sums, w, rows, s * Weight::kDepth);
    }
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(
            QUIRE_EACH(v) { Isa::store(acc + r * kPanel + v * Isa::kLanes, sums[r][v]); });
    });
}

// Some groups of a panel: of a row's num_groups, `groups` from `first` on, each of `inputs` inputs and
// `bytes` bytes. Of each group are done `steps` steps from `step` on. bias: what was added to integers.
struct Groups {
    int64_t num_groups, first, groups, inputs, bytes, step, steps;
    int32_t bias;
};

// The same of groups: sums within a group, integers where activations are int8, then the sum times
// its scales is added in float32, and the offset times what the activations add up to.
template <class Weight, bool kFetches, int kRows, int kVectors>
void grouped_tile(float* acc, const Operand& x, int64_t row, const Groups& part,
                  const Factors& factors, int64_t lane, const uint8_t* w, const Ahead& ahead) {
    using X = typename Weight::X;
    constexpr bool kRounds = std::is_same_v<X, int8_t>;
    constexpr int64_t kStepBytes = Weight::kWords * kPanel * 4;
    for (int64_t i = 0; i < part.groups; ++i) {
        const int64_t g = part.first + i, at = row * part.num_groups + g;
        typename Weight::Sum sums[kRows][kVectors];
        const X* rows[kRows];
        unrolled<kRows>(QUIRE_EACH(r) {
            rows[r] = reinterpret_cast<const X*>(x.values + (row + r) * x.stride) +
                      g * part.inputs + part.step * Weight::kDepth;
            typename Weight::Sum start{};
            if constexpr (kRounds) start = Isa::all(-part.bias * x.sums[at + r * part.num_groups]);
            unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = start; });
        });
        const uint8_t* step = w + i * part.bytes;
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
                float* place = acc + r * kPanel + v * Isa::kLanes;
                typename Isa::F total = is_first ? Isa::zero() : Isa::load(place);
                if constexpr (kRounds) {
                    const float x_scale = x.scales[at + r * part.num_groups];
                    const typename Isa::F both = Isa::times(scale, Isa::all(x_scale));
                    total = Isa::fma(Isa::to_float(sums[r][v]), both, total);
                    if constexpr (kHasOffsets<Weight>) {
                        const auto sum = static_cast<float>(x.sums[at + r * part.num_groups]);
                        total = Isa::fma(Isa::load(factors.offsets + from),
                                         Isa::all(x_scale * sum), total);
                    }
                } else {
                    total = Isa::fma(sums[r][v], scale, total);
                }
                Isa::store(place, total);
            });
        });
    }
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

// Tiles are of nearly equal size, so none of those that fetch, which are several, is small.
template <bool kFetches>
constexpr int kFewestRows = kFetches ? Isa::kTileRows / 2 : 1;
static_assert(kFetchRows >= Isa::kTileRows);

template <class Tile, int kRows = Isa::kTileRows>
void run_tile(const Tile& tile, int64_t rows) {
    if constexpr (kRows > Tile::kFewestRows) {
        if (rows < kRows) return run_tile<Tile, kRows - 1>(tile, rows);
    }
    tile_of<Tile, kRows>(tile);
}

template <class Weight, bool kFetches>
struct DenseTile {
    static constexpr int kFewestRows = quire::kFewestRows<kFetches>;
    static constexpr int kWideRows = Isa::kWideRows;
    float* acc;
    const uint8_t* x;
    int64_t stride;
    const uint8_t* w;
    int64_t steps;
    bool is_first;
    Ahead ahead;

    template <int kRows, int kVectors>
    void run(int vector) const {
        dense_tile<Weight, kFetches, kRows, kVectors>(acc + vector * Isa::kLanes, x, stride,
                                                      w + vector * Weight::kVectorBytes, steps,
                                                      ahead, is_first);
    }
};

template <class Weight, bool kFetches>
struct GroupedTile {
    static constexpr int kFewestRows = quire::kFewestRows<kFetches>;
    static constexpr int kWideRows = kTakesTurns<Weight> ? 3 : Isa::kWideRows;
    float* acc;
    const Operand* x;
    int64_t row;
    Groups part;
    const Factors* factors;
    const uint8_t* w;
    Ahead ahead;

    template <int kRows, int kVectors>
    void run(int vector) const {
        const int64_t lane = vector * Isa::kLanes;
        grouped_tile<Weight, kFetches, kRows, kVectors>(
            acc + lane, *x, row, part, *factors, lane, w + vector * Weight::kVectorBytes, ahead);
    }
};

// Calls tile(first row, rows, what to fetch, begin of the chunk) for tiles of nearly equal size.
template <class Call>
void for_tiles(int64_t rows, int64_t panel_bytes, const Call& call, int64_t chunk) {
    constexpr int64_t kLines = kPanel * 4 / 64;  // of a step
    const int64_t tiles = (rows + Isa::kTileRows - 1) / Isa::kTileRows;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = t * rows / tiles;
        Ahead ahead{panel_bytes, t * kLines / tiles, (t + 1) * kLines / tiles};
        if (rows < kFetchRows) ahead.end = ahead.begin;
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
void dense_panel(float* acc, const PackedWeight& weight, const PanelLayout& layout, const Operand& x,
                 int64_t row, int64_t rows, const uint8_t* w) {
    const int64_t steps = (weight.inputs + Weight::kDepth - 1) / Weight::kDepth;
    constexpr int64_t kChunk = kChunkBytes / (kPanel * 4);
    constexpr int64_t kStepBytes = Weight::kDepth * sizeof(typename Weight::X);
    const auto tile = [&](int64_t first, int64_t count, const Ahead& ahead, int64_t s) {
        const uint8_t* values = x.values + (row + first) * x.stride + s * kStepBytes;
        const int64_t some = steps - s < kChunk ? steps - s : kChunk;
        run_tile_of<DenseTile, Weight>(count, ahead, acc + first * kPanel, values, x.stride,
                                       w + s * kPanel * 4, some, s == 0);
    };
    for (int64_t s = 0; s < steps; s += kChunk) for_tiles(rows, layout.bytes, tile, s);
}

// Groups whose factors are decoded together: whole blocks, and of one chunk.
int64_t chunk_groups(const PanelLayout& layout) {
    const int64_t fitting = kChunkBytes / layout.group_bytes;
    return fitting < 1 ? 1 : fitting < kFactorGroups ? fitting : kFactorGroups;
}

template <class Weight>
void grouped_panel(float* acc, const PackedWeight& weight, const PanelLayout& layout,
                   const Operand& x, int64_t row, int64_t rows, const uint8_t* w) {
    const int64_t num_groups = layout.groups;
    const int64_t steps = weight.group / Weight::kDepth, step_bytes = Weight::kWords * kPanel * 4;
    const int64_t chunk = chunk_groups(layout);
    // A group larger than a chunk is parted, unless its sums are integers, which are exact.
    const bool is_parted = layout.group_bytes > kChunkBytes && !weight.rounds_activations();
    const int64_t most = is_parted ? kChunkBytes / step_bytes : steps;
    Factors factors;
    for (int64_t g = 0; g < num_groups; g += chunk) {
        const int64_t count = num_groups - g < chunk ? num_groups - g : chunk;
        decode_factors(factors, weight, layout, w, g, count);
        const auto tile = [&](int64_t first, int64_t some, const Ahead& ahead, int64_t step) {
            const int64_t end = step + most < steps ? step + most : steps;
            const Groups part{num_groups, g, count, weight.group, layout.group_bytes, step,
                              end - step, stored_bias(weight)};
            run_tile_of<GroupedTile, Weight>(some, ahead, acc + first * kPanel, &x, row + first,
                                             part, &factors,
                                             w + layout.values(g) + step * step_bytes);
        };
        for (int64_t step = 0; step < steps; step += most) {
            for_tiles(rows, layout.bytes, tile, step);
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

using PanelFunction = void (*)(float*, const PackedWeight&, const PanelLayout&, const Operand&,
                               int64_t, int64_t, const uint8_t*);

template <class Weight>
PanelFunction grouped_function(const PackedWeight& weight) {
    if (weight.parts().offsets == Offsets::kNone) return grouped_panel<Weight>;
    return grouped_panel<WithOffsets<Weight>>;
}

PanelFunction panel_function(const PackedWeight& weight) {
    switch (weight.parts().values) {
        case Values::kFloat32: return dense_panel<Float32Weight>;
        case Values::kBfloat16: return dense_panel<Bfloat16Weight>;
        case Values::kFloat16: return dense_panel<Float16Weight>;
        case Values::kFloat8: return grouped_panel<Float8Weight>;
        case Values::kFloat4: return grouped_panel<Float4Weight>;
        case Values::kInt4: return grouped_function<Int4Weight>(weight);
        case Values::kInt5: return grouped_function<Int5Weight>(weight);
        case Values::kInt6: return grouped_panel<Int6Weight>;
        default: return grouped_function<Int8Weight>(weight);
    }
}

void multiply(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
              const Operand& x, int64_t begin, int64_t end) {
    alignas(64) float acc[kBlockRows * kPanel];
    const PanelFunction panel_of = panel_function(weight);
    const PanelLayout layout(weight);
    for (int64_t p = begin; p < end; ++p) {
        for (int64_t row = 0; row < x.rows; row += kBlockRows) {
            const int64_t rows = x.rows - row < kBlockRows ? x.rows - row : kBlockRows;
            panel_of(acc, weight, layout, x, row, rows, weight.data + p * layout.bytes);
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

// Steps of the widest tile on the same few cache lines. Returns the operations of a step.
template <class Weight, class X, class Sum>
int64_t repeat_step(int64_t steps, const Sum& zero) {
    constexpr int kRows = Isa::kWideRows, kVectors = Isa::kVectors;
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

int64_t repeat(WeightFormat format, int64_t steps) {
    switch (parts_of(format).values) {
        case Values::kFloat32: return repeat_step<Float32Weight, float>(steps, Isa::zero());
        case Values::kBfloat16:
            return repeat_step<Bfloat16Weight, typename Bfloat16Weight::X>(steps, Isa::zero());
        case Values::kFloat16: return repeat_step<Float16Weight, float>(steps, Isa::zero());
        case Values::kInt8: return repeat_step<Int8Weight, int8_t>(steps, Isa::all(0));
        default: return repeat_step<Int4Weight, int8_t>(steps, Isa::all(0));
    }
}

constexpr LinearKernels kKernels{Isa::kName,    kPanel,  Isa::kInt8Offset,
                                 operand_bytes, prepare, multiply, repeat};

}  // namespace
}  // namespace quire
