// Packing of weights whose numbers stay the same. The rows of a panel are transposed in squares, so
// that reads and writes both cover whole cache lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "linear_rows.h"
#include "parallel.h"

namespace quire {

constexpr int64_t kSquare = 16;  // rows and words: a line of 32-bit words
constexpr int64_t kSquares = 4;  // that are read of each row at a time

typedef uint32_t Words4 __attribute__((vector_size(16)));

// Picks words of two vectors by their indices; indices from 4 on belong to the second.
template <int a, int b, int c, int d>
inline Words4 picked(Words4 one, Words4 other) {
#if defined(__clang__)
    return __builtin_shufflevector(one, other, a, b, c, d);
#else
    return __builtin_shuffle(one, other, Words4{a, b, c, d});
#endif
}

// Rows of a panel that are packed, each of `bytes` bytes, one after the other.
struct PanelRows {
    const uint8_t* from;
    int64_t bytes, rows;

    const uint8_t* at(int64_t lane, int64_t offset) const { return from + lane * bytes + offset; }
};

// 4 rows and words, transposed in registers: stores of single words would wait for memory.
inline void copy_four(uint32_t* to, const PanelRows& rows, int64_t panel, int64_t lane,
                      int64_t word) {
    Words4 row[4];
    for (int64_t i = 0; i < 4; ++i) std::memcpy(&row[i], rows.at(lane + i, word * 4), 16);
    const Words4 first = picked<0, 4, 1, 5>(row[0], row[1]), last = picked<2, 6, 3, 7>(row[0], row[1]);
    const Words4 more = picked<0, 4, 1, 5>(row[2], row[3]), rest = picked<2, 6, 3, 7>(row[2], row[3]);
    const Words4 columns[4] = {picked<0, 1, 4, 5>(first, more), picked<2, 3, 6, 7>(first, more),
                               picked<0, 1, 4, 5>(last, rest), picked<2, 3, 6, 7>(last, rest)};
    for (int64_t w = 0; w < 4; ++w) std::memcpy(to + w * panel, &columns[w], 16);
}

// Transposes a square of up to 16 rows from `lane` on and 16 words from `first` on. `to` points to
// its first word. Words without a row or an input are 0.
template <class Word>
void copy_square(Word* to, const PanelRows& rows, int64_t panel, int64_t lane, int64_t first) {
    constexpr auto size = static_cast<int64_t>(sizeof(Word));
    if constexpr (size == 4) {
        const bool is_whole = lane + kSquare <= rows.rows && (first + kSquare) * 4 <= rows.bytes;
        if (is_whole) {
            for (int64_t w = 0; w < kSquare; w += 4) {
                for (int64_t i = 0; i < kSquare; i += 4) {
                    copy_four(to + w * panel + i, rows, panel, lane + i, first + w);
                }
            }
            return;
        }
    }
    const int64_t count = std::min(kSquare, (rows.bytes + size - 1) / size - first);
    const int64_t lanes = std::min(kSquare, panel - lane);
    const int64_t part = std::min(count * size, rows.bytes - first * size);
    Word square[kSquare][kSquare] = {};
    for (int64_t i = 0; i < lanes && lane + i < rows.rows; ++i) {
        std::memcpy(square[i], rows.at(lane + i, first * size), static_cast<size_t>(part));
    }
    for (int64_t w = 0; w < count; ++w) {
        for (int64_t i = 0; i < lanes; ++i) to[w * panel + i] = square[i][w];
    }
}

// to[word * panel + lane] = word `word` of the row of that lane; lanes without a row become 0, and so
// does what a last word lacks.
template <class Word>
void copy_panel(Word* to, const PanelRows& rows, int64_t panel) {
    constexpr auto size = static_cast<int64_t>(sizeof(Word));
    constexpr int64_t strip = kSquares * kSquare;
    const int64_t words = (rows.bytes + size - 1) / size;
    for (int64_t begin = 0; begin < words; begin += strip) {
        const int64_t end = std::min(words, begin + strip);
        for (int64_t lane = 0; lane < panel; lane += kSquare) {
            for (int64_t first = begin; first < end; first += kSquare) {
                copy_square(to + first * panel + lane, rows, panel, lane, first);
            }
        }
    }
}

// The weight has no groups; its element is from's. Returns what pack_weight does.
inline int copy_panels(uint8_t* data, const PackedWeight& weight, const WeightRows& from,
                       int num_threads) {
    const int64_t panel = linear_kernels(weight.variant).panel;
    const int64_t panel_bytes = packed_panel_bytes(weight);
    PackError error;
    const auto pack = [&](RowReader& reader, int64_t p) {
        uint8_t* to = data + p * panel_bytes;
        const PanelRows rows{reader.row(p * panel), reader.row_bytes(),
                             std::min(panel, weight.outputs - p * panel)};
        const int64_t used = panel * rows.bytes;  // an odd number of inputs leaves a rest
        if (used < panel_bytes) std::memset(to + used, 0, static_cast<size_t>(panel_bytes - used));
        if (weight.format == WeightFormat::kFloat16) {
            copy_panel(reinterpret_cast<uint16_t*>(to), rows, panel);
        } else {
            copy_panel(reinterpret_cast<uint32_t*>(to), rows, panel);
        }
    };
    const auto pack_part = [&](int64_t begin, int64_t end) {
        RowReader reader(weight, from, error);
        for (int64_t p = begin; p < end; ++p) pack(reader, p);
    };
    parallel_for((weight.outputs + panel - 1) / panel, num_threads, pack_part, kPartsOfWeight);
    return error.code();
}

}  // namespace quire
