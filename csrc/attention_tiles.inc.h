// The products and the softmax of attention, once for all variants: included by one source file per
// instruction set after that has defined `Isa`. All of it is in an unnamed namespace, so that no
// variant's code is ever shared with another's. What an Isa must have:
//
//   F, I             vectors of kLanes floats and of as many int32; + - * << >> & work on them
//   kLanes           4, 8 or 16
//   kTileRows        queries of a register tile; of up to kWideRows it has four vectors, else two
//   all, load, store, load_words, fma(a, b, c) = a * b + c, max
//   where_at_least(x, limit, value)   value where x >= limit, else 0
//   load_bfloat16, load_float16, load_int8   kLanes of them, widened
//   float16_of(words)                 the lower halves of words, widened
//   transpose(rows)                   of kLanes x kLanes words, in place
#pragma once

#include "attention_softmax.inc.h"

namespace quire {
namespace {

constexpr int64_t kTile = 64;      // tokens whose keys or values are widened at once
constexpr int kTileVectors = 4;    // most of a register tile
constexpr int64_t kAhead = 32;     // tokens between those that are read and those that are fetched

// --- formats: kPerWord elements of kBytes in each 32-bit word ---

struct Float32Kv {
    static constexpr int kBytes = 4, kPerWord = 1;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return Isa::load(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return reinterpret_cast<F>(words);
    }
};

struct Bfloat16Kv {
    static constexpr int kBytes = 2, kPerWord = 2;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return Isa::load_bfloat16(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return reinterpret_cast<F>(kElement == 0 ? words << 16 : words & -65536);
    }
};

struct Float16Kv {
    static constexpr int kBytes = 2, kPerWord = 2;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return Isa::load_float16(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return Isa::float16_of(kElement == 0 ? words : words >> 16);
    }
};

// Without the scale, which goes to the scores of keys and to the weights of values.
struct Int8Kv {
    static constexpr int kBytes = 1, kPerWord = 4;
    static constexpr bool kScaled = true;
    static QUIRE_INLINE F load(const void* at) { return Isa::load_int8(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return __builtin_convertvector(words << (24 - 8 * kElement) >> 24, F);
    }
};

// --- keys ---

// Elements of kLanes tokens from byte `byte` of their keys on go to tile[h][token].
template <class Kv, bool kWhole>
QUIRE_INLINE void transpose_keys(float* tile, const uint8_t* keys, const int64_t* offsets,
                                 int64_t byte, int64_t row_bytes) {
    constexpr int64_t kChunk = kLanes * 4;
    I rows[kLanes];
    unrolled<kLanes>(QUIRE_EACH(t) {
        const uint8_t* from = keys + offsets[t] + byte;
        __builtin_prefetch(keys + offsets[t + kAhead] + byte);
        if constexpr (kWhole) {
            rows[t] = Isa::load_words(from);
        } else {
            uint8_t padded[kChunk] = {};
            std::memcpy(padded, from, static_cast<size_t>(row_bytes - byte));
            rows[t] = Isa::load_words(padded);
        }
    });
    Isa::transpose(rows);
    const int64_t first = byte / Kv::kBytes, left = row_bytes / Kv::kBytes - first;
    unrolled<kLanes>(QUIRE_EACH(w) {
        unrolled<Kv::kPerWord>(QUIRE_EACH(e) {
            const int64_t h = w * Kv::kPerWord + e;
            if (kWhole || h < left) {
                Isa::store(tile + (first + h) * kTile, Kv::template element<e>(rows[w]));
            }
        });
    });
}

// tile[h][t] = the keys of `tokens` tokens, a multiple of 16.
template <class Kv>
void load_keys(float* tile, const uint8_t* keys, const int64_t* offsets, int64_t tokens,
               int64_t dim) {
    const int64_t row_bytes = dim * Kv::kBytes;
    for (int64_t t = 0; t < tokens; t += kLanes) {
        int64_t byte = 0;
        for (; byte + kLanes * 4 <= row_bytes; byte += kLanes * 4) {
            transpose_keys<Kv, true>(tile + t, keys, offsets + t, byte, row_bytes);
        }
        if (byte < row_bytes) {
            transpose_keys<Kv, false>(tile + t, keys, offsets + t, byte, row_bytes);
        }
    }
}

// scores[r][vectors of tokens] = q[r] . tile.
template <int kRows, int kVectors>
void score_tile(float* scores, const float* q, int64_t q_stride, const float* tile, int64_t dim) {
    F sums[kRows][kVectors];
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = F{}; });
    });
    for (int64_t h = 0; h < dim; ++h) {
        F keys[kVectors];
        unrolled<kVectors>(QUIRE_EACH(v) { keys[v] = Isa::load(tile + h * kTile + v * kLanes); });
        unrolled<kRows>(QUIRE_EACH(r) {
            const F query = Isa::all(q[r * q_stride + h]);
            unrolled<kVectors>(
                QUIRE_EACH(v) { sums[r][v] = Isa::fma(query, keys[v], sums[r][v]); });
        });
    }
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(
            QUIRE_EACH(v) { Isa::store(scores + r * kSpan + v * kLanes, sums[r][v]); });
    });
}

struct ScoreTile {
    float* scores;
    const float* q;
    int64_t q_stride;
    const float* tile;
    int64_t dim;

    template <int kRows, int kVectors>
    void run(int64_t row, int64_t vector) const {
        score_tile<kRows, kVectors>(scores + row * kSpan + vector * kLanes, q + row * q_stride,
                                    q_stride, tile + vector * kLanes, dim);
    }
};

// --- values ---

// Values where they stand, and values that were widened.
template <class Kv>
struct StoredValues {
    const uint8_t* values;
    const int64_t* offsets;
    QUIRE_INLINE void fetch(int64_t t, int64_t h) const {
        __builtin_prefetch(values + offsets[t + kAhead] + h * Kv::kBytes);
    }
    QUIRE_INLINE F load(int64_t t, int64_t h) const {
        return Kv::load(values + offsets[t] + h * Kv::kBytes);
    }
};

struct WidenedValues {
    const float* tile;
    int64_t stride;
    QUIRE_INLINE void fetch(int64_t, int64_t) const {}
    QUIRE_INLINE F load(int64_t t, int64_t h) const { return Isa::load(tile + t * stride + h); }
};

// acc[r][h ...] += sum over t of weights[r][t] * values[t][h ...].
template <class Values, int kRows, int kVectors>
void value_tile(float* acc, int64_t stride, const float* weights, const Values& values,
                int64_t tokens, int64_t h) {
    F sums[kRows][kVectors];
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(
            QUIRE_EACH(v) { sums[r][v] = Isa::load(acc + r * stride + v * kLanes); });
    });
    for (int64_t t = 0; t < tokens; ++t) {
        F loaded[kVectors];
        unrolled<kVectors>(QUIRE_EACH(v) {
            loaded[v] = values.load(t, h + v * kLanes);
            values.fetch(t, h + v * kLanes);
        });
        unrolled<kRows>(QUIRE_EACH(r) {
            const F weight = Isa::all(weights[r * kSpan + t]);
            unrolled<kVectors>(
                QUIRE_EACH(v) { sums[r][v] = Isa::fma(weight, loaded[v], sums[r][v]); });
        });
    }
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(
            QUIRE_EACH(v) { Isa::store(acc + r * stride + v * kLanes, sums[r][v]); });
    });
}

template <class Values>
struct ValueTile {
    float* acc;
    int64_t stride;
    const float* weights;
    Values values;
    int64_t tokens;

    template <int kRows, int kVectors>
    void run(int64_t row, int64_t vector) const {
        value_tile<Values, kRows, kVectors>(acc + row * stride + vector * kLanes, stride,
                                            weights + row * kSpan, values, tokens,
                                            vector * kLanes);
    }
};

// tile[t][h] = the values of tokens, filled up to `stride` elements with zeros.
template <class Kv>
void widen_values(float* tile, int64_t stride, const uint8_t* values, const int64_t* offsets,
                  int64_t tokens, int64_t dim) {
    const int64_t whole = dim / kLanes * kLanes;
    for (int64_t t = 0; t < tokens; ++t, tile += stride) {
        const uint8_t* from = values + offsets[t];
        const uint8_t* next = values + offsets[t + kAhead];
        for (int64_t b = 0; b < dim * Kv::kBytes; b += 64) __builtin_prefetch(next + b);
        for (int64_t h = 0; h < whole; h += kLanes) {
            Isa::store(tile + h, Kv::load(from + h * Kv::kBytes));
        }
        if (whole == dim) continue;
        uint8_t padded[kLanes * 4] = {};
        std::memcpy(padded, from + whole * Kv::kBytes,
                    static_cast<size_t>((dim - whole) * Kv::kBytes));
        std::memset(tile + whole, 0, static_cast<size_t>(stride - whole) * sizeof(float));
        Isa::store(tile + whole, Kv::load(padded));
    }
}

// --- register tiles over all rows and vectors ---

template <class Tile, int kRows>
QUIRE_INLINE void run_vectors(const Tile& tile, int64_t row, int64_t vectors) {
    constexpr int kWidth = kRows <= Isa::kWideRows ? kTileVectors : kTileVectors / 2;
    int64_t v = 0;
    for (; v + kWidth <= vectors; v += kWidth) tile.template run<kRows, kWidth>(row, v);
    if constexpr (kWidth == kTileVectors) {
        if (v + 2 <= vectors) {
            tile.template run<kRows, 2>(row, v);
            v += 2;
        }
    }
    if (v < vectors) tile.template run<kRows, 1>(row, v);
}

// Rows [begin, end), in tiles of nearly equal size.
template <class Tile>
void run_rows(const Tile& tile, int64_t begin, int64_t end, int64_t vectors) {
    const int64_t rows = end - begin, tiles = (rows + Isa::kTileRows - 1) / Isa::kTileRows;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = begin + i * rows / tiles;
        switch (begin + (i + 1) * rows / tiles - row) {
            case 1: run_vectors<Tile, 1>(tile, row, vectors); break;
            case 2: run_vectors<Tile, 2>(tile, row, vectors); break;
            case 3: run_vectors<Tile, 3>(tile, row, vectors); break;
            case 4: run_vectors<Tile, 4>(tile, row, vectors); break;
            case 5: run_vectors<Tile, Isa::kTileRows < 5 ? 4 : 5>(tile, row, vectors); break;
            default: run_vectors<Tile, Isa::kTileRows>(tile, row, vectors);
        }
    }
}

}  // namespace
}  // namespace quire

#include "attention_items.inc.h"
