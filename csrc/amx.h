// The tiles of AMX: eight registers of up to 16 rows of 64 bytes, and the products of two of them.
//
// One shape configures all eight registers, and fixes the layout of registers and memory:
//
//   c [M rows, N words] += a [M rows, K words] * b [K rows, N words]
//
// where a word is a pair of bfloat16 or four bytes, in b of the inputs that follow one another of one
// output: the order of the panels (linear.h). Instructions as text, since GCC 12's own do not say that a
// load reads memory. tests/csrc/emulated_tiles.h has the same in plain C++.
#pragma once

#include <cstdint>

namespace quire {

// The registers' shapes, as `ldtilecfg` reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

struct HardwareTiles {
    static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
    // Otherwise the registers are saved at each switch of threads.
    static void release() { asm volatile("tilerelease"); }

    template <int t>
    static inline void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t));
    }
    // stride: bytes between rows.
    template <int t>
    static inline void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    static inline void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
    }
    // Adds dot products in float32. Even inputs and odd inputs are summed apart; then both sums are
    // added to the previous value. Subnormal numbers count as 0.
    template <int c, int a, int b>
    static inline void dot_bfloat16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    // Sums are int32, a's bytes signed.
    template <int c, int a, int b>
    static inline void dot_signed() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    template <int c, int a, int b>
    static inline void dot_unsigned() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

}  // namespace quire
