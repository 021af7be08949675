// Blocks of tiles of AMX (amx.h): how the eight registers are shared by sums and what is multiplied. To be
// included above a target pragma.
#pragma once

#include <cstdint>

#ifdef QUIRE_EMULATED_AMX
#include "emulated_tiles.h"
#else
#include "amx.h"
#endif

namespace quire {

#ifdef QUIRE_EMULATED_AMX
using Tiles = EmulatedTiles;
#else
using Tiles = HardwareTiles;
#endif

constexpr int64_t kTileHeight = 16, kTileBytes = 64;
constexpr int64_t kBlockOfRows = 2 * kTileHeight;
constexpr int kRowTile = 4, kSumTiles = 4;

// The shapes that this thread's tiles have, until it goes.
class TileConfiguration {
   public:
    TileConfiguration() = default;
    TileConfiguration(const TileConfiguration&) = delete;
    TileConfiguration& operator=(const TileConfiguration&) = delete;
    ~TileConfiguration() {
        if (rows_ != 0) Tiles::release();
    }

    // Configures tiles for a block of `rows` rows and `bytes` of each row's inputs. The contents of
    // the tiles are lost.
    void set(int64_t rows, int64_t bytes) {
        if (rows == rows_ && bytes == bytes_) return;
        rows_ = rows;
        bytes_ = bytes;
        TileShapes shapes;
        const auto shape = [&](int64_t tile, int64_t height, int64_t width) {
            shapes.rows[tile] = static_cast<uint8_t>(height);
            shapes.row_bytes[tile] = static_cast<uint16_t>(width);
        };
        const bool is_wide = rows <= kTileHeight;
        const int64_t upper = is_wide ? rows : kTileHeight, lower = is_wide ? rows : rows - kTileHeight;
        for (int64_t t = 0; t < kSumTiles; ++t) shape(t, t < 2 ? upper : lower, kTileBytes);
        shape(kRowTile, upper, bytes);
        for (int64_t t = kRowTile + 1; t < 8; ++t) shape(t, bytes / 4, kTileBytes);
        if (!is_wide) shape(kRowTile + 1, lower, bytes);
        Tiles::configure(shapes);
    }

   private:
    int64_t rows_ = 0, bytes_ = 0;
};

// The shape of blocks of kHeight tiles of rows and kWidth tiles of outputs.
template <int kHeight>
struct Shape {
    static constexpr int kWidth = kSumTiles / kHeight;
    static constexpr int64_t kColumns = kWidth * kTileHeight;
    static constexpr int sum(int r, int v) { return r * kWidth + v; }
    static constexpr int row(int r) { return kRowTile + r; }
    // The first of them is another tile with each column, so that loads need not wait for products.
    static constexpr int weight(int v) { return kRowTile + kHeight + v % (kSumTiles - kHeight); }
};

}  // namespace quire
