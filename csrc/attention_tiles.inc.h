// The products and the softmax of attention, once for all variants: included by one source file per
// instruction set after that has defined `Isa`. All of it is in an unnamed namespace, so that no
// variant's code is ever shared with another's. What an Isa must have:
//
//   F, I             vectors of kLanes floats and of as many int32; + - * << >> & work on them
//   kLanes           4, 8 or 16
//   kTileRows        queries of a register tile; of up to kWideRows it has four vectors, else two
//   all, load, store, load_words, fma(a, b, c) = a * b + c, max
//   largest, total                    of a vector's lanes i and i + half, then of half as many, ...
//   where_at_least(x, limit, value)   value where x >= limit, else 0
//   load_bfloat16, load_float16       kLanes of them, widened
//   load_bytes                        kLanes signed bytes as words
//   float16_of(words)                 the lower halves of words, widened
//
// and with QUIRE_BFLOAT16_DOTS: all_word, store_words, store_bfloat16, pairs, store_pairs,
// dot(sum, a, b) = sum + a . b. QUIRE_OTHER_FORMATS: as in linear_tiles.inc.h. With QUIRE_AMX there are
// Tiles and their blocks as well (amx_blocks.h).
#pragma once

#include "attention_softmax.inc.h"

namespace quire {
namespace {

constexpr int64_t kTile = 64;      // tokens whose keys or values are widened at once
constexpr int kTileVectors = 4;    // most of a register tile
constexpr int64_t kAhead = 64;     // tokens between the read and the prefetch

// Into the second-level cache: few lines can be on their way into the first.
inline void fetch_line(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }

// --- formats: kPerWord elements of kBytes in each 32-bit word ---

// Weights as the products take them. kTokens: positions whose values are read together. kFewRows: most
// queries for which keys and values are read where they stand without being widened. kRowsBehind: for
// how many rows more than there are queries memory is needed.
struct FloatWeights {
    static constexpr bool kMatrices = false;
    static constexpr int64_t kTokens = 1, kRowsAfter = 0, kFewRows = Isa::kTileRows;
    static QUIRE_INLINE void store_weights(float* row, int64_t t, F weights) {
        Isa::store(row + t, weights);
    }
    static QUIRE_INLINE void clear_weights(float* row, int64_t begin, int64_t end) {
        fill(row + begin, row + end, 0.0f);
    }
};

struct Float32Kv : FloatWeights {
    static constexpr bool kDots = false;
    static constexpr int kBytes = 4, kPerWord = 1;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return Isa::load(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return reinterpret_cast<F>(words);
    }
};

struct Bfloat16Kv : FloatWeights {
    static constexpr bool kDots = false;
    static constexpr int kBytes = 2, kPerWord = 2;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return Isa::load_bfloat16(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return reinterpret_cast<F>(kElement == 0 ? words << 16 : words & -65536);
    }
};

struct Float16Kv : FloatWeights {
    static constexpr bool kDots = false;
    static constexpr int kBytes = 2, kPerWord = 2;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return Isa::load_float16(at); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return Isa::float16_of(kElement == 0 ? words : words >> 16);
    }
};

// Without the scale, which goes to the scores of keys and to the weights of values.
struct Int8Kv : FloatWeights {
    static constexpr bool kDots = false;
    static constexpr int kBytes = 1, kPerWord = 4;
    static constexpr bool kScaled = true;
    static QUIRE_INLINE F load(const void* at) {
        return __builtin_convertvector(Isa::load_bytes(at), F);
    }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return __builtin_convertvector(words << (24 - 8 * kElement) >> 24, F);
    }
};

// e4m3 numbers as float16 of the same exponent bits: kFloat8Factor too small.
struct Float8Kv : FloatWeights {
    static constexpr bool kDots = false;
    static constexpr int kBytes = 1, kPerWord = 4;
    static constexpr bool kScaled = false;
    static QUIRE_INLINE F load(const void* at) { return widened(Isa::load_bytes(at)); }
    template <int kElement>
    static QUIRE_INLINE F element(I words) {
        return widened(words << (24 - 8 * kElement) >> 24);
    }

   private:
    // bytes: with their sign in all higher bits. The largest magnitude is NaN.
    static QUIRE_INLINE F widened(I bytes) {
        const I magnitude = bytes & 0x7F, is_nan = magnitude == 0x7F;
        return Isa::float16_of((bytes & 0x8000) | magnitude << 7 | (is_nan & 0x7E00));
    }
};

// --- keys ---

// The blocks of one head's keys. Word w of a token stands at data + columns[token] + w * stride. If
// vectors of tokens stand together, in one block each, columns of their first ones are enough.
// are_rows: the words of a token follow each other.
struct KeyBlocks {
    const uint8_t* data;
    int64_t stride;       // bytes between the words of a token
    int64_t block_bytes;
    int64_t row_bytes;
    bool together;
    bool are_rows;

    int64_t words() const { return row_bytes / 4; }
    int64_t rest() const { return row_bytes % 4; }
};

template <bool kTogether>
QUIRE_INLINE I load_key_words(const KeyBlocks& keys, const int64_t* columns, int64_t word) {
    const uint8_t* from = keys.data + word * keys.stride;
    if constexpr (kTogether) return Isa::load_words(from + columns[0]);
    uint32_t words[kLanes];
    for (int64_t t = 0; t < kLanes; ++t) std::memcpy(words + t, from + columns[t], sizeof *words);
    return Isa::load_words(words);
}

// The bytes of kLanes tokens that make no word, as words.
inline I load_key_rest(const KeyBlocks& keys, const int64_t* columns) {
    uint32_t words[kLanes] = {};
    for (int64_t t = 0; t < kLanes; ++t) {
        // A contiguous vector has one address, its first column's.
        const int64_t column = keys.together ? columns[0] + 4 * t : columns[t];
        const int64_t in_block = column % keys.block_bytes / 4;
        const int64_t at = column / keys.block_bytes * keys.block_bytes +
                           keys.words() * keys.stride + in_block * keys.rest();
        std::memcpy(words + t, keys.data + at, static_cast<size_t>(keys.rest()));
    }
    return Isa::load_words(words);
}

// Lane l of the result is a's lane l, or with kSecond its lane l + kStep, where l has no bit kStep.
// Elsewhere it is b's lane l - kStep, or with kSecond its lane l.
template <int kStep, bool kSecond, int... kLane>
QUIRE_INLINE I exchanged(I a, I b, std::integer_sequence<int, kLane...>) {
    constexpr int kFrom = kSecond ? kStep : 0;
#ifdef __clang__
    return __builtin_shufflevector(
        a, b, (kLane & kStep ? int(kLanes) + kLane - kStep + kFrom : kLane + kFrom)...);
#else
    return __builtin_shuffle(
        a, b, I{(kLane & kStep ? int(kLanes) + kLane - kStep + kFrom : kLane + kFrom)...});
#endif
}

// Lane l of rows[i] becomes lane i of rows[l].
template <int kStep = 1>
QUIRE_INLINE void transpose(I (&rows)[kLanes]) {
    constexpr std::make_integer_sequence<int, kLanes> kAll{};
    unrolled<kLanes>(QUIRE_EACH(i) {
        if constexpr ((i & kStep) == 0) {
            const I a = rows[i], b = rows[i + kStep];
            rows[i] = exchanged<kStep, false>(a, b, kAll);
            rows[i + kStep] = exchanged<kStep, true>(a, b, kAll);
        }
    });
    if constexpr (2 * kStep < kLanes) transpose<2 * kStep>(rows);
}

// Calls take(word, words of kLanes tokens) for the words of keys that stand row by row, from `first` on.
template <class Take>
QUIRE_INLINE void turn_rows(const KeyBlocks& keys, const int64_t* columns, int64_t first,
                            const Take& take) {
    int64_t word = first;
    for (; word + kLanes <= keys.words(); word += kLanes) {
        I rows[kLanes];
        unrolled<kLanes>(QUIRE_EACH(t) {
            fetch_line(keys.data + columns[t + kAhead] + 4 * word);
            rows[t] = Isa::load_words(keys.data + columns[t] + 4 * word);
        });
        transpose(rows);
        unrolled<kLanes>(QUIRE_EACH(i) { take(word + i, rows[i]); });
    }
    for (; word < keys.words(); ++word) take(word, load_key_words<false>(keys, columns, word));
}

// tile[h][t] = the keys of `tokens` tokens that stand row by row.
template <class Kv>
void load_key_rows(float* tile, const KeyBlocks& keys, const int64_t* columns, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t += kLanes) {
        turn_rows(keys, columns + t, Kv::kScaled, [&](int64_t word, I words) QUIRE_ALWAYS {
            float* to = tile + t + (word - Kv::kScaled) * Kv::kPerWord * kTile;
            unrolled<Kv::kPerWord>(
                QUIRE_EACH(e) { Isa::store(to + e * kTile, Kv::template element<e>(words)); });
        });
    }
}

template <class Kv, bool kTogether>
void load_keys(float* tile, const KeyBlocks& keys, const int64_t* columns, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t += kLanes) {
        float* to = tile + t;
        for (int64_t word = Kv::kScaled; word < keys.words(); ++word) {
            if constexpr (kTogether) {
                fetch_line(keys.data + columns[t + kAhead] + word * keys.stride);
            }
            const I words = load_key_words<kTogether>(keys, columns + t, word);
            unrolled<Kv::kPerWord>(QUIRE_EACH(e) {
                Isa::store(to, Kv::template element<e>(words));
                to += kTile;
            });
        }
        if (keys.rest() == 0) continue;
        const I words = load_key_rest(keys, columns + t);
        unrolled<Kv::kPerWord>(QUIRE_EACH(e) {
            if (e < keys.rest() / Kv::kBytes) Isa::store(to + e * kTile, Kv::template element<e>(words));
        });
    }
}

// tile[h][t] = the keys of `tokens` tokens, a multiple of 16.
template <class Kv>
void load_keys(float* tile, const KeyBlocks& keys, const int64_t* columns, int64_t tokens) {
    if (keys.are_rows) return load_key_rows<Kv>(tile, keys, columns, tokens);
    if (keys.together) return load_keys<Kv, true>(tile, keys, columns, tokens);
    load_keys<Kv, false>(tile, keys, columns, tokens);
}

// Keys where they stand, together and without a rest, and keys that were widened: kStep elements of
// kVectors vectors of tokens at a time.
template <class Kv>
struct StoredKeys {
    static constexpr int kStep = Kv::kPerWord;
    KeyBlocks blocks;
    const int64_t* columns;

    template <int kVectors>
    QUIRE_INLINE void load(F (&keys)[kStep][kVectors], int64_t vector, int64_t h) const {
        const uint8_t* from = blocks.data + (Kv::kScaled + h / kStep) * blocks.stride;
        unrolled<kVectors>(QUIRE_EACH(v) {
            const int64_t* column = columns + (vector + v) * kLanes;
            fetch_line(from + column[kAhead]);
            const I words = Isa::load_words(from + column[0]);
            unrolled<kStep>(QUIRE_EACH(e) { keys[e][v] = Kv::template element<e>(words); });
        });
    }
};

struct WidenedKeys {
    static constexpr int kStep = 1;
    const float* tile;

    template <int kVectors>
    QUIRE_INLINE void load(F (&keys)[kStep][kVectors], int64_t vector, int64_t h) const {
        unrolled<kVectors>(QUIRE_EACH(v) {
            keys[0][v] = Isa::load(tile + h * kTile + (vector + v) * kLanes);
        });
    }
};

// Returns the number of vectors that hold the scores of `tokens` tokens.
inline int64_t vectors_of(int64_t tokens) {
    return (tokens + kSumLanes - 1) / kSumLanes * kSumVectors;
}

// scores[r][vectors of tokens] = q[r] . keys.
template <class Keys, int kRows, int kVectors>
void score_tile(float* scores, const float* q, int64_t q_stride, const Keys& keys, int64_t vector,
                int64_t dim) {
    F sums[kRows][kVectors];
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = F{}; });
    });
    for (int64_t h = 0; h < dim; h += Keys::kStep) {
        F loaded[Keys::kStep][kVectors];
        keys.load(loaded, vector, h);
        unrolled<Keys::kStep>(QUIRE_EACH(e) {
            unrolled<kRows>(QUIRE_EACH(r) {
                const F query = Isa::all(q[r * q_stride + h + e]);
                unrolled<kVectors>(
                    QUIRE_EACH(v) { sums[r][v] = Isa::fma(query, loaded[e][v], sums[r][v]); });
            });
        });
    }
    unrolled<kRows>(QUIRE_EACH(r) {
        unrolled<kVectors>(
            QUIRE_EACH(v) { Isa::store(scores + r * kSpan + v * kLanes, sums[r][v]); });
    });
}

template <class Keys>
struct ScoreTile {
    float* scores;
    const float* q;
    int64_t q_stride;
    Keys keys;
    int64_t dim;

    int64_t vectors(int64_t seen) const { return vectors_of(seen); }
    template <int kRows, int kVectors>
    void run(int64_t row, int64_t vector, int64_t) const {
        score_tile<Keys, kRows, kVectors>(scores + row * kSpan + vector * kLanes,
                                          q + row * q_stride, q_stride, keys, vector, dim);
    }
};

// --- values ---

// Values where they stand, and values that were widened.
template <class Kv>
struct StoredValues {
    const uint8_t* values;
    const int64_t* offsets;
    QUIRE_INLINE void fetch(int64_t t, int64_t h) const {
        fetch_line(values + offsets[t + kAhead] + h * Kv::kBytes);
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
    int64_t dim;  // a multiple of kLanes

    int64_t vectors(int64_t) const { return dim / kLanes; }
    template <int kRows, int kVectors>
    void run(int64_t row, int64_t vector, int64_t seen) const {
        value_tile<Values, kRows, kVectors>(acc + row * stride + vector * kLanes, stride,
                                            weights + row * kSpan, values, seen,
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
        for (int64_t b = 0; b < dim * Kv::kBytes; b += 64) fetch_line(next + b);
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
QUIRE_INLINE void run_vectors(const Tile& tile, int64_t row, int64_t seen) {
    constexpr int kWidth = kRows <= Isa::kWideRows ? kTileVectors : kTileVectors / 2;
    const int64_t vectors = tile.vectors(seen);
    int64_t v = 0;
    for (; v + kWidth <= vectors; v += kWidth) tile.template run<kRows, kWidth>(row, v, seen);
    if constexpr (kWidth == kTileVectors) {
        if (v + 2 <= vectors) {
            tile.template run<kRows, 2>(row, v, seen);
            v += 2;
        }
    }
    if (v < vectors) tile.template run<kRows, 1>(row, v, seen);
}

// Rows [begin, end), in tiles of nearly equal size. reach(first, last): how many of the tile's tokens
// these rows see.
template <class Tile, class Reach>
void run_rows(const Tile& tile, int64_t begin, int64_t end, const Reach& reach) {
    const int64_t rows = end - begin, tiles = (rows + Isa::kTileRows - 1) / Isa::kTileRows;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t row = begin + i * rows / tiles, last = begin + (i + 1) * rows / tiles;
        const int64_t seen = reach(row, last);
        switch (last - row) {
            case 1: run_vectors<Tile, 1>(tile, row, seen); break;
            case 2: run_vectors<Tile, 2>(tile, row, seen); break;
            case 3: run_vectors<Tile, 3>(tile, row, seen); break;
            case 4: run_vectors<Tile, 4>(tile, row, seen); break;
            case 5: run_vectors<Tile, Isa::kTileRows < 5 ? 4 : 5>(tile, row, seen); break;
            default: run_vectors<Tile, Isa::kTileRows>(tile, row, seen);
        }
    }
}

}  // namespace
}  // namespace quire

#ifdef QUIRE_BFLOAT16_DOTS
#include "attention_dots.inc.h"
#endif
#ifdef QUIRE_AMX
#include "attention_matrices.inc.h"
#endif
#include "attention_items.inc.h"
