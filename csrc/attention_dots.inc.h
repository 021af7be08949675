// Products of bfloat16 pairs, for keys and values of bfloat16: included by attention_tiles.inc.h.
//
// A word of a transposed key is a pair of its elements, as the dot instruction reads it. Values are
// paired by tokens, positions 2 i and 2 i + 1 of a span, for every query; hidden positions have
// weight 0. Scaled queries and weights are rounded to bfloat16; sums of weights are not.
#pragma once

namespace quire {
namespace {

constexpr int64_t kWordsTogether = 16;  // to multiples of which queries are filled up with zeros

// `words` pairs of numbers become bfloat16.
inline void narrow_row(float* to, const float* row, int64_t words) {
    auto* bytes = reinterpret_cast<uint8_t*>(to);
    for (int64_t i = 0; i < 2 * words; i += kLanes) {
        Isa::store_bfloat16(bytes + 2 * i, Isa::load(row + i));
    }
}

// Words of keys where they stand, and words that were brought together. kFetches: whether they are read
// for the first time, so that those ahead are to be fetched.
template <bool kFetches>
struct StoredWords {
    KeyBlocks blocks;
    const int64_t* columns;
    QUIRE_INLINE I load(int64_t vector, int64_t word) const {
        const uint8_t* from = blocks.data + word * blocks.stride;
        if constexpr (kFetches) fetch_line(from + columns[vector * kLanes + kAhead]);
        return Isa::load_words(from + columns[vector * kLanes]);
    }
};

struct TileWords {
    const float* tile;
    QUIRE_INLINE I load(int64_t vector, int64_t word) const {
        return Isa::load_words(tile + word * kTile + vector * kLanes);
    }
};

// tile[word][t] = the words of `tokens` tokens, a multiple of 16, filled up to `words` with zeros.
template <bool kTogether>
void gather_words(float* tile, const KeyBlocks& keys, const int64_t* columns, int64_t tokens,
                  int64_t words) {
    for (int64_t t = 0; t < tokens; t += kLanes) {
        float* to = tile + t;
        for (int64_t word = 0; word < keys.words(); ++word, to += kTile) {
            if constexpr (kTogether) {
                fetch_line(keys.data + columns[t + kAhead] + word * keys.stride);
            }
            Isa::store_words(to, load_key_words<kTogether>(keys, columns + t, word));
        }
        if (keys.rest() > 0) Isa::store_words(to, load_key_rest(keys, columns + t));
        for (int64_t word = (keys.row_bytes + 3) / 4; word < words; ++word) {
            Isa::store_words(tile + t + word * kTile, I{});
        }
    }
}

// The same for keys that stand row by row.
inline void gather_rows(float* tile, const KeyBlocks& keys, const int64_t* columns, int64_t tokens,
                        int64_t words) {
    for (int64_t t = 0; t < tokens; t += kLanes) {
        turn_rows(keys, columns + t, 0, [&](int64_t word, I all) QUIRE_ALWAYS {
            Isa::store_words(tile + t + word * kTile, all);
        });
        for (int64_t word = keys.words(); word < words; ++word) {
            Isa::store_words(tile + t + word * kTile, I{});
        }
    }
}

// scores[r][vectors of tokens] = q[r] . keys, of words of queries and keys.
template <class Words>
struct DotScores {
    float* scores;
    const float* q;
    int64_t q_stride;
    Words keys;
    int64_t words;

    int64_t vectors(int64_t seen) const { return vectors_of(seen); }
    template <int kRows, int kVectors>
    void run(int64_t row, int64_t vector, int64_t) const {
        F sums[kRows][kVectors] = {};
        const float* from = q + row * q_stride;
        for (int64_t w = 0; w < words; ++w) {
            I loaded[kVectors];
            unrolled<kVectors>(QUIRE_EACH(v) { loaded[v] = keys.load(vector + v, w); });
            unrolled<kRows>(QUIRE_EACH(r) {
                const I query = Isa::all_word(from + r * q_stride + w);
                unrolled<kVectors>(
                    QUIRE_EACH(v) { sums[r][v] = Isa::dot(sums[r][v], query, loaded[v]); });
            });
        }
        unrolled<kRows>(QUIRE_EACH(r) {
            unrolled<kVectors>(QUIRE_EACH(v) {
                Isa::store(scores + (row + r) * kSpan + (vector + v) * kLanes, sums[r][v]);
            });
        });
    }
};

// Values of pairs of tokens where they stand, and pairs that were made before.
struct StoredPairs {
    const uint8_t* values;
    const int64_t* offsets;
    QUIRE_INLINE I load(int64_t t, int64_t h) const {
        fetch_line(values + offsets[t + kAhead] + 2 * h);
        fetch_line(values + offsets[t + kAhead + 1] + 2 * h);
        return Isa::pairs(values + offsets[t] + 2 * h, values + offsets[t + 1] + 2 * h);
    }
};

struct TilePairs {
    const float* tile;
    int64_t stride;
    QUIRE_INLINE I load(int64_t t, int64_t h) const {
        return Isa::load_words(tile + t / 2 * stride + h);
    }
};

// tile[i][h] = the values of tokens 2 i and 2 i + 1, filled up to a whole vector with zeros.
QUIRE_INLINE void pair_values(float* tile, int64_t stride, const uint8_t* values,
                              const int64_t* offsets, int64_t tokens, int64_t dim) {
    const int64_t whole = dim / kLanes * kLanes;
    for (int64_t t = 0; t < tokens; t += 2, tile += stride) {
        const uint8_t *first = values + offsets[t], *second = values + offsets[t + 1];
        for (int64_t b = 0; b < dim * 2; b += 64) {
            fetch_line(values + offsets[t + kAhead] + b);
            fetch_line(values + offsets[t + kAhead + 1] + b);
        }
        int64_t h = 0;
        for (; h + 2 * kLanes <= whole; h += 2 * kLanes) {
            Isa::store_pairs(tile + h, first + 2 * h, second + 2 * h);
        }
        if (h < whole) Isa::store_words(tile + h, Isa::pairs(first + 2 * h, second + 2 * h));
        if (whole == dim) continue;
        uint8_t padded[2][kLanes * 2] = {};
        const auto rest = static_cast<size_t>((dim - whole) * 2);
        std::memcpy(padded[0], first + 2 * whole, rest);
        std::memcpy(padded[1], second + 2 * whole, rest);
        Isa::store_words(tile + whole, Isa::pairs(padded[0], padded[1]));
    }
}

// acc[r][h ...] = sum over pairs of tokens of their weights times their values.
template <class Pairs>
struct DotValues {
    float* acc;
    int64_t stride;
    const uint8_t* weights;  // bfloat16, rows kSpan * 4 bytes apart
    Pairs values;
    int64_t dim;  // a multiple of kLanes

    int64_t vectors(int64_t) const { return dim / kLanes; }
    template <int kRows, int kVectors>
    void run(int64_t row, int64_t vector, int64_t seen) const {
        F sums[kRows][kVectors] = {};
        float* to = acc + row * stride + vector * kLanes;
        const uint8_t* from = weights + row * kSpan * 4;
        for (int64_t t = 0; t < seen; t += 2) {
            I loaded[kVectors];
            unrolled<kVectors>(
                QUIRE_EACH(v) { loaded[v] = values.load(t, (vector + v) * kLanes); });
            unrolled<kRows>(QUIRE_EACH(r) {
                const I weight = Isa::all_word(from + r * kSpan * 4 + 2 * t);
                unrolled<kVectors>(
                    QUIRE_EACH(v) { sums[r][v] = Isa::dot(sums[r][v], weight, loaded[v]); });
            });
        }
        unrolled<kRows>(QUIRE_EACH(r) {
            unrolled<kVectors>(
                QUIRE_EACH(v) { Isa::store(to + r * stride + v * kLanes, sums[r][v]); });
        });
    }
};

// Products of bfloat16 keys and values by dots.
struct Bfloat16Dots : Bfloat16Kv {
    static constexpr bool kDots = true;
    static constexpr int64_t kTokens = 2, kRowsAfter = 1, kBlockRows = Isa::kTileRows;
    template <class Words>
    using Scores = DotScores<Words>;
    template <class Pairs>
    using Values = DotValues<Pairs>;
    using MadePairs = TilePairs;

    static QUIRE_INLINE void store_weights(float* row, int64_t t, F weights) {
        Isa::store_bfloat16(reinterpret_cast<uint8_t*>(row) + 2 * t, weights);
    }
    static QUIRE_INLINE void clear_weights(float* row, int64_t begin, int64_t end) {
        if (begin >= end) return;
        const auto bytes = static_cast<size_t>(2 * (end - begin));
        std::memset(reinterpret_cast<uint8_t*>(row) + 2 * begin, 0, bytes);
    }
    static StoredPairs stored_pairs(const uint8_t* values, const int64_t* offsets, float*) {
        return {values, offsets};
    }
    template <class Dots, class Reach>
    static void over_rows(const Dots& dots, int64_t begin, int64_t end, const Reach& reach) {
        run_rows(dots, begin, end, reach);
    }
};

}  // namespace
}  // namespace quire
