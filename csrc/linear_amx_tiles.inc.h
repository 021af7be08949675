// Products of tiles (amx.h), with the code for bfloat16: included by linear_amx.cpp.
//
// A product of tiles is up to 16 rows times 16 outputs over 64 bytes of inputs. Weights of bfloat16
// and int8 are read in place from a panel; others are converted to bytes first, once for all rows.
// A block is 32 rows times half a panel, or up to 16 rows times a whole one: four tiles of sums
// either way.
//
// bfloat16 always uses tiles, also for a single row. Sums of 32 inputs end at multiples of 32. Each
// is added to the earlier sums, whatever the number of rows.
#pragma once

namespace quire {
namespace {

constexpr int64_t kMatrixRows = 4 * kBlockOfRows;  // whose sums wait together
constexpr int64_t kDenseStep = kTileHeight * kPanel * 4;
constexpr int64_t kStretchBytes = 32 * 1024;  // of a panel, in the first cache
constexpr int64_t kUnpackedMatrixBytes = 16 * 1024;  // the same, of integers in small groups

struct Bfloat16Dots {
    template <int c, int a, int b>
    static QUIRE_INLINE void add() {
        Tiles::dot_bfloat16<c, a, b>();
    }
};
struct SignedDots {
    template <int c, int a, int b>
    static QUIRE_INLINE void add() {
        Tiles::dot_signed<c, a, b>();
    }
};
struct UnsignedDots {
    template <int c, int a, int b>
    static QUIRE_INLINE void add() {
        Tiles::dot_unsigned<c, a, b>();
    }
};

// Sums of a block += the products of a step. w: the first tile's part.
template <class Dots, int kHeight>
QUIRE_INLINE void add_matrices(const uint8_t* x, int64_t stride, const uint8_t* w) {
    using S = Shape<kHeight>;
    unrolled<kHeight>(QUIRE_EACH(r) {
        Tiles::load<S::row(r)>(x + r * kTileHeight * stride, stride);
    });
    unrolled<S::kWidth>(QUIRE_EACH(v) {
        Tiles::load<S::weight(v)>(w + v * kTileBytes, kPanel * 4);
        unrolled<kHeight>(
            QUIRE_EACH(r) { Dots::template add<S::sum(r, v), S::row(r), S::weight(v)>(); });
    });
}

// A product: of which weight, and where the weights end that this thread multiplies.
struct Product {
    const PackedWeight& weight;
    const PanelLayout& layout;
    const Operand& x;
    TileConfiguration& tiles;
    const uint8_t* end;
};

// Memory to prefetch while a block computes: `bytes` with each step, in whole cache lines.
struct Trickle {
    const uint8_t* next;
    int64_t bytes;

    QUIRE_INLINE void fetch() {
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
        next += bytes;
    }
};

// The share of block `number`, of `blocks` with `steps` steps each, in asking for some bytes. Weights of
// other threads are left to them, and for rows behind the first ones all is there already.
Trickle share_of(const Product& product, int64_t row, const uint8_t* from, int64_t bytes,
                 int64_t number, int64_t blocks, int64_t steps) {
    if (row > 0 || from >= product.end) return {from, 0};
    const int64_t share = up(bytes, blocks * steps * 64) * 64;
    return {from + number * steps * share, share};
}

// Blocks of `rows` rows, times halves of the panel where they have two tiles of rows.
constexpr int64_t blocks_of(int64_t rows) {
    return rows / kBlockOfRows * 2 + (up(rows % kBlockOfRows, kTileHeight));
}

// Calls block(first row, rows, first output, number) for all blocks of up to kMatrixRows rows, with the
// tiles' number as a constant.
template <class Block>
void for_blocks(int64_t rows, const Block& block) {
    int64_t number = 0;
    for (int64_t first = 0; first < rows; first += kBlockOfRows) {
        const int64_t some = rows - first < kBlockOfRows ? rows - first : kBlockOfRows;
        if (some <= kTileHeight) {
            block(std::integral_constant<int, 1>{}, first, some, 0, number++);
            continue;
        }
        for (int64_t lane = 0; lane < kPanel; lane += Shape<2>::kColumns) {
            block(std::integral_constant<int, 2>{}, first, some, lane, number++);
        }
    }
}

// --- bfloat16 ---

// Returns the place of a tile in the stored sums, [rows, kPanel] of float32 or int32.
template <int kHeight>
QUIRE_INLINE uint8_t* place_of(uint8_t* sums, int tile) {
    const int r = tile / Shape<kHeight>::kWidth, v = tile % Shape<kHeight>::kWidth;
    return sums + r * kTileHeight * kPanel * 4 + v * kTileBytes;
}

// The products of `steps` steps are added to a block's sums, or replace them.
template <class Dots, int kHeight>
void dense_block(uint8_t* sums, const uint8_t* x, int64_t stride, const uint8_t* w, int64_t steps,
                 int64_t row_bytes, Trickle ahead, bool is_first) {
    unrolled<kSumTiles>(QUIRE_EACH(t) {
        if (is_first) {
            Tiles::zero<t>();
        } else {
            Tiles::load<t>(place_of<kHeight>(sums, t), kPanel * 4);
        }
    });
    for (int64_t s = 0; s < steps; ++s, x += row_bytes, w += row_bytes * kPanel) {
        ahead.fetch();
        add_matrices<Dots, kHeight>(x, stride, w);
    }
    unrolled<kSumTiles>(
        QUIRE_EACH(t) { Tiles::store<t>(place_of<kHeight>(sums, t), kPanel * 4); });
}

// Some steps of a panel, `row_bytes` bytes of each row, for rows [row, row + rows).
// x: the first row's inputs; w: the panel's weights; next: memory to prefetch, `next_bytes`.
struct Stretch {
    const uint8_t *x, *w;
    int64_t steps, row_bytes;
    const uint8_t* next;
    int64_t next_bytes;
    bool is_first;
};

template <class Dots>
void add_stretch(uint8_t* sums, const Product& product, int64_t row, int64_t rows,
                 const Stretch& part) {
    const int64_t stride = product.x.stride, blocks = blocks_of(rows);
    for_blocks(rows, [&](auto height, int64_t first, int64_t some, int64_t lane, int64_t number) {
        product.tiles.set(some, part.row_bytes);
        dense_block<Dots, height>(sums + (first * kPanel + lane) * 4, part.x + first * stride, stride,
                                  part.w + lane * 4, part.steps, part.row_bytes,
                                  share_of(product, row, part.next, part.next_bytes, number, blocks,
                                           part.steps),
                                  part.is_first);
    });
}

// All steps, which stand one after the other, in stretches that the first cache has room for. A block
// alone reads memory in one stream.
template <class Dots>
void add_stretches(uint8_t* sums, const Product& product, int64_t row, int64_t rows,
                   const uint8_t* x, const uint8_t* w, int64_t steps, int64_t row_bytes) {
    const int64_t step_bytes = row_bytes * kPanel, fitting = kStretchBytes / step_bytes;
    const bool is_alone = rows <= kTileHeight;
    for (int64_t s = 0; s < steps; s += fitting) {
        const int64_t some = steps - s < fitting ? steps - s : fitting;
        const uint8_t* from = w + s * step_bytes;
        const uint8_t* next = from + (is_alone ? kAheadBytes : some * step_bytes);
        add_stretch<Dots>(sums, product, row, rows,
                          {x + s * row_bytes, from, some, row_bytes, next, some * step_bytes, s == 0});
    }
}

// The incomplete last step of a panel, padded with zeros.
struct LastStep {
    alignas(64) uint8_t bytes[kDenseStep];

    LastStep(const uint8_t* w, int64_t num_bytes) {
        std::memset(bytes, 0, sizeof bytes);
        std::memcpy(bytes, w, static_cast<size_t>(num_bytes));
    }
};

// Rows [row, row + rows) of a panel.
void dense_matrices(float* acc, const Product& product, int64_t row, int64_t rows,
                    const uint8_t* w) {
    auto* sums = reinterpret_cast<uint8_t*>(acc);
    const int64_t bytes = product.layout.bytes, whole = bytes / kDenseStep;
    const uint8_t* x = product.x.values + row * product.x.stride;
    add_stretches<Bfloat16Dots>(sums, product, row, rows, x, w, whole, kTileBytes);
    const int64_t rest = bytes - whole * kDenseStep;
    if (rest == 0) return;
    const LastStep last(w + whole * kDenseStep, rest);
    add_stretch<Bfloat16Dots>(sums, product, row, rows,
                              {x + whole * kTileBytes, last.bytes, 1, kTileBytes, product.end, 0,
                               whole == 0});
}

}  // namespace
}  // namespace quire
