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

namespace quire {
namespace {

constexpr int64_t kPanel = Isa::kVectors * Isa::kLanes;
constexpr int64_t kBlockRows = 120;          // rows whose sums wait together
constexpr int64_t kFetchRows = 10;  // rows from which on the next panel is fetched ahead
constexpr int64_t kChunkBytes = 256 * 1024;  // of a panel: half of a small L2 cache

#define QUIRE_INLINE inline __attribute__((always_inline))

// --- formats: what one step along K loads, and how it is added ---

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

struct Int8Weight {
    static constexpr int64_t kDepth = 4, kVectorBytes = Isa::kLanes * 4;
    static constexpr int32_t kOffset = Isa::kInt8Offset;
    struct Loaded {
        typename Isa::I words;
    };
    static QUIRE_INLINE Loaded load(const uint8_t* w) { return {Isa::load_words(w)}; }
    static QUIRE_INLINE void add(typename Isa::I& sum, const Loaded& w, const int8_t* x) {
        sum = Isa::dot_bytes(sum, w.words, Isa::all_word(x));
    }
};

struct Int4Weight {
    static constexpr int64_t kDepth = 8, kVectorBytes = Isa::kLanes * 4;
    static constexpr int32_t kOffset = kInt4Offset;
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
};

// --- tiles ---

// body(0), body(1), ... with numbers that are known to the compiler: arrays of sums that are indexed by
// them are kept in registers, which those of a loop are not, even if it is unrolled later.
template <int kCount, class Body>
QUIRE_INLINE void unrolled(const Body& body) {
    if constexpr (kCount > 0) {
        unrolled<kCount - 1>(body);
        body(std::integral_constant<int, kCount - 1>{});
    }
}

#define QUIRE_EACH(index) [&](auto index) __attribute__((always_inline))

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

// Some groups of a panel: of num_groups, `groups` groups of `steps` steps each, from `first` on.
struct Groups {
    int64_t num_groups, first, groups, steps;
};

// The same of int8 activations: integers within a group, then the group's sum times both scales is
// added in float32. w: the first group's scales; vector: the first of the panel's vectors.
template <class Weight, bool kFetches, int kRows, int kVectors>
void quantised_tile(float* acc, const Operand& x, int64_t row, const Groups& part, const uint8_t* w,
                    int64_t vector, const Ahead& ahead) {
    const int64_t steps = part.steps, num_groups = part.num_groups;
    for (int64_t g = part.first; g < part.first + part.groups; ++g) {
        const int64_t at = row * num_groups + g;
        typename Isa::I sums[kRows][kVectors];
        const int8_t* rows[kRows];
        unrolled<kRows>(QUIRE_EACH(r) {
            rows[r] = reinterpret_cast<const int8_t*>(x.values) + (row + r) * x.stride +
                      g * steps * Weight::kDepth;
            const typename Isa::I start = Isa::all(x.sums[at + r * num_groups]);
            unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = start; });
        });
        const uint8_t* scales = w + vector * Isa::kLanes * 2;
        w += kPanel * 2 + vector * Weight::kVectorBytes;
        for (int64_t s = 0; s < steps; ++s, w += kPanel * 4) {
            if constexpr (kFetches) ahead.fetch(w);
            add_step<Weight, kRows, kVectors>(sums, w, rows, s * Weight::kDepth);
        }
        w -= vector * Weight::kVectorBytes;
        unrolled<kVectors>(QUIRE_EACH(v) {
            const typename Isa::F scale = Isa::widen_bfloat16(scales + v * Isa::kLanes * 2);
            unrolled<kRows>(QUIRE_EACH(r) {
                float* place = acc + r * kPanel + v * Isa::kLanes;
                const typename Isa::F both =
                    Isa::times(scale, Isa::all(x.scales[at + r * num_groups]));
                const typename Isa::F before = g == 0 ? Isa::zero() : Isa::load(place);
                Isa::store(place, Isa::fma(Isa::to_float(sums[r][v]), both, before));
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

template <class Tile>
void run_tile(const Tile& tile, int64_t rows) {
    switch (rows) {
        case 1: return tile_of<Tile, 1>(tile);
        case 2: return tile_of<Tile, 2>(tile);
        case 3: return tile_of<Tile, 3>(tile);
        case 4: return tile_of<Tile, 4>(tile);
        case 5: return tile_of<Tile, 5>(tile);
        case 6: return tile_of<Tile, 6>(tile);
        case 7: return tile_of<Tile, 7>(tile);
        default: return tile_of<Tile, 8>(tile);
    }
}

template <class Weight, bool kFetches>
struct DenseTile {
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
struct QuantisedTile {
    static constexpr int kWideRows = Isa::kWideRows;
    float* acc;
    const Operand* x;
    int64_t row;
    Groups part;
    const uint8_t* w;
    Ahead ahead;

    // The scales of a vector have half the bytes of its weights, so w cannot simply be moved on.
    template <int kRows, int kVectors>
    void run(int vector) const {
        quantised_tile<Weight, kFetches, kRows, kVectors>(acc + vector * Isa::kLanes, *x, row, part,
                                                          w, vector, ahead);
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
void dense_panel(float* acc, const PackedWeight& weight, const Operand& x, int64_t row,
                 int64_t rows, const uint8_t* w) {
    const int64_t steps = (weight.inputs + Weight::kDepth - 1) / Weight::kDepth;
    constexpr int64_t kChunk = kChunkBytes / (kPanel * 4);
    constexpr int64_t kStepBytes = Weight::kDepth * sizeof(typename Weight::X);
    const auto tile = [&](int64_t first, int64_t count, const Ahead& ahead, int64_t s) {
        const uint8_t* values = x.values + (row + first) * x.stride + s * kStepBytes;
        const int64_t some = steps - s < kChunk ? steps - s : kChunk;
        run_tile_of<DenseTile, Weight>(count, ahead, acc + first * kPanel, values, x.stride,
                                       w + s * kPanel * 4, some, s == 0);
    };
    const int64_t bytes = packed_panel_bytes(weight);
    for (int64_t s = 0; s < steps; s += kChunk) for_tiles(rows, bytes, tile, s);
}

template <class Weight>
void quantised_panel(float* acc, const PackedWeight& weight, const Operand& x, int64_t row,
                     int64_t rows, const uint8_t* w) {
    const int64_t groups = weight.groups(), steps = weight.group / Weight::kDepth;
    const int64_t group_bytes = kPanel * (2 + 4 * steps);
    const int64_t chunk = kChunkBytes > group_bytes ? kChunkBytes / group_bytes : 1;
    const auto tile = [&](int64_t first, int64_t count, const Ahead& ahead, int64_t g) {
        const Groups part{groups, g, groups - g < chunk ? groups - g : chunk, steps};
        run_tile_of<QuantisedTile, Weight>(count, ahead, acc + first * kPanel, &x, row + first, part,
                                           w + g * group_bytes);
    };
    const int64_t bytes = packed_panel_bytes(weight);
    for (int64_t g = 0; g < groups; g += chunk) for_tiles(rows, bytes, tile, g);
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

using PanelFunction = void (*)(float*, const PackedWeight&, const Operand&, int64_t, int64_t,
                               const uint8_t*);

PanelFunction panel_function(const PackedWeight& weight) {
    switch (weight.format) {
        case WeightFormat::kFloat32: return dense_panel<Float32Weight>;
        case WeightFormat::kBfloat16: return dense_panel<Bfloat16Weight>;
        case WeightFormat::kFloat16: return dense_panel<Float16Weight>;
        case WeightFormat::kInt8: return quantised_panel<Int8Weight>;
        default: return quantised_panel<Int4Weight>;
    }
}

void multiply(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
              const Operand& x, int64_t begin, int64_t end) {
    alignas(64) float acc[kBlockRows * kPanel];
    const PanelFunction panel_of = panel_function(weight);
    const int64_t bytes = packed_panel_bytes(weight);
    for (int64_t p = begin; p < end; ++p) {
        for (int64_t row = 0; row < x.rows; row += kBlockRows) {
            const int64_t rows = x.rows - row < kBlockRows ? x.rows - row : kBlockRows;
            panel_of(acc, weight, x, row, rows, weight.data + p * bytes);
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

// --- activations ---

constexpr bool kReadsBfloat16 = sizeof(typename Bfloat16Weight::X) == 2;

bool reads_bfloat16(const PackedWeight& weight) {
    return kReadsBfloat16 && weight.format == WeightFormat::kBfloat16;
}

int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

int64_t operand_bytes(const PackedWeight& weight, const Matrix& x) {
    if (weight.is_quantised()) return weight.groups() * weight.group;
    const Element read = reads_bfloat16(weight) ? Element::kBfloat16 : Element::kFloat32;
    const bool pairs = weight.format != WeightFormat::kFloat32;
    if (x.element == read && (!pairs || x.columns % 2 == 0)) return 0;
    return even(x.columns) * (read == Element::kFloat32 ? 4 : 2);
}

// To int8, to the nearest. Adding 1.5 * 2^23 leaves the rounded number in the lowest bits.
template <class T>
void quantise_group(int8_t* out, float& scale, int32_t& sum, const T* x, int64_t count) {
    int32_t peak = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t magnitude = bits_of(widen(x[i])) & 0x7FFFFFFF;
        peak = magnitude > peak ? magnitude : peak;
    }
    // Below this the inverse would overflow, and all values round to nothing anyway.
    const float largest = float_of(peak), inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
    scale = largest / 127.0f;
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = bits_of(widen(x[i]) * inverse + 12582912.0f);
        const auto value = static_cast<int8_t>(bits);
        out[i] = value;
        total += value;
    }
    sum = total;
}

template <class T>
void quantise_row(const MutableOperand& operand, const PackedWeight& weight, const T* x,
                  int64_t row) {
    const int64_t groups = weight.groups(), group = weight.group;
    auto* out = reinterpret_cast<int8_t*>(operand.values + row * operand.stride);
    const int32_t offset =
        weight.format == WeightFormat::kInt8 ? Int8Weight::kOffset : Int4Weight::kOffset;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t left = weight.inputs - g * group, count = left < group ? left : group;
        const int64_t at = row * groups + g;
        quantise_group(out + g * group, operand.scales[at], operand.sums[at], x + g * group, count);
        operand.sums[at] *= -offset;
    }
    for (int64_t i = weight.inputs; i < groups * group; ++i) out[i] = 0;
}

template <class T>
void prepare_row(const MutableOperand& operand, const PackedWeight& weight, const T* x,
                 int64_t row) {
    if (weight.is_quantised()) return quantise_row(operand, weight, x, row);
    uint8_t* to = operand.values + row * operand.stride;
    const int64_t count = weight.inputs, padded = even(count);
    if (reads_bfloat16(weight)) {
        auto* out = reinterpret_cast<Bfloat16*>(to);
        for (int64_t i = 0; i < count; ++i) narrow(out[i], widen(x[i]));
        if (padded > count) out[count] = Bfloat16{0};
    } else {
        auto* out = reinterpret_cast<float*>(to);
        for (int64_t i = 0; i < count; ++i) out[i] = widen(x[i]);
        if (padded > count) out[count] = 0.0f;
    }
}

template <class T>
void prepare_rows(const MutableOperand& operand, const PackedWeight& weight, const Matrix& x,
                  int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        prepare_row(operand, weight, static_cast<const T*>(x.data) + row * x.stride, row);
    }
}

void prepare(const MutableOperand& operand, const PackedWeight& weight, const Matrix& x,
             int64_t begin, int64_t end) {
    switch (x.element) {
        case Element::kFloat32: return prepare_rows<float>(operand, weight, x, begin, end);
        case Element::kBfloat16: return prepare_rows<Bfloat16>(operand, weight, x, begin, end);
        default: return prepare_rows<Float16>(operand, weight, x, begin, end);
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
    switch (format) {
        case WeightFormat::kFloat32: return repeat_step<Float32Weight, float>(steps, Isa::zero());
        case WeightFormat::kBfloat16:
            return repeat_step<Bfloat16Weight, typename Bfloat16Weight::X>(steps, Isa::zero());
        case WeightFormat::kFloat16: return repeat_step<Float16Weight, float>(steps, Isa::zero());
        case WeightFormat::kInt8: return repeat_step<Int8Weight, int8_t>(steps, Isa::all(0));
        default: return repeat_step<Int4Weight, int8_t>(steps, Isa::all(0));
    }
}

constexpr LinearKernels kKernels{Isa::kName,    kPanel,  Isa::kInt8Offset,
                                 operand_bytes, prepare, multiply, repeat};

}  // namespace
}  // namespace quire
