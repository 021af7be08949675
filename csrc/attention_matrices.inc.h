// Products of AMX tiles (amx_blocks.h) for bfloat16 keys and values: included by
// attention_tiles.inc.h, with QUIRE_AMX. The inputs are the same as in attention_dots.inc.h.
//
// A tile of up to 16 queries is multiplied by a tile of 16 tokens, 32 elements of a head at a time.
// A tile of weights is multiplied by a tile of 16 elements, 32 tokens of a span at a time, hidden
// positions included. A step of 32 is summed by itself, then added to the earlier steps. So a step
// whose weights are all 0 changes no bit, and neither does the number of queries. Heads of other
// sizes are padded with zeros to whole steps.
//
// All tiles of an item have one shape: as many rows as there are queries, at most 16. Rows after
// the last query have memory with undefined contents.
#pragma once

namespace quire {
namespace {

constexpr int64_t kStepWords = 16;  // of a step: pairs of elements, or of tokens
constexpr int64_t kStepTokens = 2 * kStepWords;

// sums[r][c ...] of a block of tiles. make(step) comes before the loads of a step, and before the products
// of the step before it; load(tile, column, step) fills a tile.
template <int kHeight, int kWidth, class Make, class Load>
QUIRE_INLINE void multiply_block(float* sums, int64_t stride, const void* rows, int64_t row_bytes,
                                 int64_t steps, const Make& make, const Load& load) {
    using S = Shape<kHeight>;
    const auto each_sum = QUIRE_EACH(body) {
        unrolled<kHeight>(QUIRE_EACH(r) { unrolled<kWidth>(QUIRE_EACH(v) { body(r, v); }); });
    };
    each_sum([&](auto r, auto v) { Tiles::zero<S::sum(r, v)>(); });
    if (steps > 0) make(int64_t{0});
    auto* from = static_cast<const uint8_t*>(rows);
    for (int64_t step = 0; step < steps; ++step, from += kTileBytes) {
        if (step + 1 < steps) make(step + 1);
        unrolled<kHeight>(QUIRE_EACH(r) {
            Tiles::load<S::row(r)>(from + r * kTileHeight * row_bytes, row_bytes);
        });
        unrolled<kWidth>(QUIRE_EACH(v) {
            load(std::integral_constant<int, S::weight(v)>{}, v, step);
            unrolled<kHeight>(QUIRE_EACH(r) {
                Tiles::dot_bfloat16<S::sum(r, v), S::row(r), S::weight(v)>();
            });
        });
    }
    each_sum([&](auto r, auto v) {
        Tiles::store<S::sum(r, v)>(sums + r * kTileHeight * stride + v * kTileHeight, stride * 4);
    });
}

// --- keys ---

// A step's words of 16 tokens, a vector of words after the other.
template <int kTileNumber, bool kFetches>
QUIRE_INLINE void load_tile(const StoredWords<kFetches>& keys, int64_t vector, int64_t step) {
    const int64_t* column = keys.columns + vector * kLanes;
    const uint8_t* from = keys.blocks.data + step * kStepWords * keys.blocks.stride;
    if constexpr (kFetches) {
        const uint8_t* num_later_seen = from + column[kAhead];
        for (int64_t i = 0; i < kStepWords; ++i) fetch_line(num_later_seen + i * keys.blocks.stride);
    }
    Tiles::load<kTileNumber>(from + column[0], keys.blocks.stride);
}

template <int kTileNumber>
QUIRE_INLINE void load_tile(const TileWords& keys, int64_t vector, int64_t step) {
    Tiles::load<kTileNumber>(keys.tile + step * kStepWords * kTile + vector * kLanes, kTile * 4);
}

// scores[r][vectors of tokens] = q[r] . keys; words: whole steps.
template <class Words>
struct MatrixScores {
    float* scores;
    const float* q;
    int64_t q_stride;
    Words keys;
    int64_t words;

    int64_t vectors(int64_t seen) const { return vectors_of(seen); }
    template <int kHeight, int kWidth>
    void run(int64_t row, int64_t vector, int64_t) const {
        multiply_block<kHeight, kWidth>(
            scores + row * kSpan + vector * kLanes, kSpan, q + row * q_stride, q_stride * 4,
            words / kStepWords, QUIRE_EACH() {},
            [&](auto tile, auto v, int64_t step) __attribute__((always_inline)) {
                load_tile<tile>(keys, vector + v, step);
            });
    }
};

// --- values ---

// Values in place. A step's pairs are made in one of two buffers in turn, because a load from a
// buffer waits for the stores just before it.
struct WayPairs {
    static constexpr int64_t kStride = Shape<1>::kColumns;
    const uint8_t* values;
    const int64_t* offsets;
    float* memory;  // of 2 * kStepWords * kStride

    float* place(int64_t step) const { return memory + step % 2 * kStepWords * kStride; }
    template <int kWidth>
    QUIRE_INLINE void make(int64_t step, int64_t h) const {
        pair_values(place(step), kStride, values + 2 * h, offsets + step * kStepTokens, kStepTokens,
                    kWidth * kLanes);
    }
    template <int kTileNumber>
    QUIRE_INLINE void load(int64_t step, int64_t, int64_t column) const {
        Tiles::load<kTileNumber>(place(step) + column * kLanes, kStride * 4);
    }
};

struct MatrixPairs : TilePairs {
    template <int kWidth>
    QUIRE_INLINE void make(int64_t, int64_t) const {}
    template <int kTileNumber>
    QUIRE_INLINE void load(int64_t step, int64_t h, int64_t column) const {
        Tiles::load<kTileNumber>(tile + step * kStepWords * stride + h + column * kLanes, stride * 4);
    }
};

// acc[r][h ...] = sum over steps of 32 tokens of their weights times their values.
template <class Pairs>
struct MatrixValues {
    float* acc;
    int64_t stride;
    const uint8_t* weights;  // bfloat16, rows kSpan * 4 bytes apart
    Pairs values;
    int64_t dim;  // a multiple of kLanes

    int64_t vectors(int64_t) const { return dim / kLanes; }
    template <int kHeight, int kWidth>
    void run(int64_t row, int64_t vector, int64_t seen) const {
        const int64_t h = vector * kLanes;
        multiply_block<kHeight, kWidth>(
            acc + row * stride + h, stride, weights + row * kSpan * 4, kSpan * 4,
            (seen + kStepTokens - 1) / kStepTokens,
            [&](int64_t step) __attribute__((always_inline)) { values.template make<kWidth>(step, h); },
            [&](auto tile, auto v, int64_t step) __attribute__((always_inline)) {
                values.template load<tile>(step, h, v);
            });
    }
};

// --- blocks over all rows and vectors ---

template <int kHeight, class Matrix>
void run_blocks(const Matrix& matrix, int64_t row, int64_t seen) {
    constexpr int kWidth = Shape<kHeight>::kWidth;
    const int64_t vectors = matrix.vectors(seen);
    int64_t v = 0;
    for (; v + kWidth <= vectors; v += kWidth) matrix.template run<kHeight, kWidth>(row, v, seen);
    if constexpr (kWidth == 4) {
        if (vectors - v == 3) return matrix.template run<kHeight, 3>(row, v, seen);
        if (vectors - v == 2) return matrix.template run<kHeight, 2>(row, v, seen);
    }
    if (v < vectors) matrix.template run<kHeight, 1>(row, v, seen);
}

// Products of bfloat16 keys and values by tiles.
struct Bfloat16Matrices : Bfloat16Dots {
    static constexpr bool kMatrices = true;
    static constexpr int64_t kTokens = kStepTokens, kRowsAfter = kTileHeight;
    static constexpr int64_t kFewRows = kTileHeight, kBlockRows = kBlockOfRows;
    template <class Words>
    using Scores = MatrixScores<Words>;
    template <class Pairs>
    using Values = MatrixValues<Pairs>;
    using MadePairs = MatrixPairs;

    static WayPairs stored_pairs(const uint8_t* values, const int64_t* offsets, float* memory) {
        return {values, offsets, memory};
    }

    // reach(first, last): how many of the block's tokens these rows see.
    template <class Matrix, class Reach>
    static void over_rows(const Matrix& matrix, int64_t begin, int64_t end, const Reach& reach) {
        for (int64_t row = begin; row < end; row += kBlockOfRows) {
            const int64_t seen = reach(row, minimum(row + kBlockOfRows, end));
            if (end - row > kTileHeight) {
                run_blocks<2>(matrix, row, seen);
            } else {
                run_blocks<1>(matrix, row, seen);
            }
        }
    }
};

}  // namespace
}  // namespace quire
