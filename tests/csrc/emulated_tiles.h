// The tiles of AMX (csrc/amx.h) one number at a time, as Intel's manual describes each instruction: for
// CPUs without them, and to check the instructions against. What a CPU refuses ends the program.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "amx.h"

namespace quire {

struct EmulatedTiles {
    static void configure(const TileShapes& shapes) {
        State& state = own();
        state = State{};
        require(shapes.palette == 1 && shapes.start_row == 0, "a palette");
        for (int t = 0; t < 16; ++t) {
            const bool is_empty = shapes.rows[t] == 0 && shapes.row_bytes[t] == 0;
            require(is_empty || (t < 8 && shapes.rows[t] > 0 && shapes.row_bytes[t] > 0), "a tile");
            require(shapes.rows[t] <= 16 && shapes.row_bytes[t] <= 64, "a tile's shape");
        }
        state.shapes = shapes;
        state.is_configured = true;
    }
    static void release() { own() = State{}; }

    template <int t>
    static void zero() {
        (void)rows(t);
        std::memset(own().bytes[t], 0, sizeof own().bytes[t]);
    }
    template <int t>
    static void load(const void* from, int64_t stride) {
        zero<t>();
        for (int i = 0; i < rows(t); ++i) {
            std::memcpy(own().bytes[t][i], static_cast<const uint8_t*>(from) + i * stride,
                        static_cast<size_t>(row_bytes(t)));
        }
    }
    template <int t>
    static void store(void* to, int64_t stride) {
        for (int i = 0; i < rows(t); ++i) {
            std::memcpy(static_cast<uint8_t*>(to) + i * stride, own().bytes[t][i],
                        static_cast<size_t>(row_bytes(t)));
        }
    }

    template <int c, int a, int b>
    static void dot_bfloat16() {
        check_product(c, a, b);
        const int words = row_bytes(a) / 4, columns = row_bytes(c) / 4;
        for (int m = 0; m < rows(c); ++m) {
            for (int n = 0; n < columns; ++n) {
                float even = 0, odd = 0;
                for (int k = 0; k < words; ++k) {
                    even = multiply_add(half(a, m, 2 * k), half(b, k, 2 * n), even);
                    odd = multiply_add(half(a, m, 2 * k + 1), half(b, k, 2 * n + 1), odd);
                }
                float total;
                uint8_t* place = own().bytes[c][m] + 4 * n;
                std::memcpy(&total, place, sizeof total);
                total = sum(total, sum(even, odd));
                std::memcpy(place, &total, sizeof total);
            }
        }
        clear_rest(c);
    }
    template <int c, int a, int b>
    static void dot_signed() {
        dot_bytes<int8_t>(c, a, b);
    }
    template <int c, int a, int b>
    static void dot_unsigned() {
        dot_bytes<uint8_t>(c, a, b);
    }

   private:
    struct State {
        bool is_configured = false;
        TileShapes shapes;
        uint8_t bytes[8][16][64] = {};
    };

    static State& own() {
        thread_local State state;
        return state;
    }
    static void require(bool is_allowed, const char* what) {
        if (is_allowed) return;
        std::printf("  wrong: a CPU with AMX would refuse %s\n", what);
        std::abort();
    }
    static int rows(int t) {
        require(own().is_configured && own().shapes.rows[t] > 0, "a tile that has no shape");
        return own().shapes.rows[t];
    }
    static int row_bytes(int t) { return own().shapes.row_bytes[t]; }

    static void check_product(int c, int a, int b) {
        require(c != a && c != b && a != b, "a product whose tiles are the same");
        require(rows(a) == rows(c) && row_bytes(b) == row_bytes(c), "a product's shape");
        require(rows(b) * 4 == row_bytes(a) && row_bytes(c) % 4 == 0, "a product's inputs");
    }
    static void clear_rest(int t) {
        for (int m = rows(t); m < 16; ++m) std::memset(own().bytes[t][m], 0, 64);
    }

    static float flushed(float value) {
        return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
    }
    static float half(int t, int row, int i) {
        uint16_t bits;
        std::memcpy(&bits, own().bytes[t][row] + 2 * i, sizeof bits);
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return flushed(value);
    }
    // Rounded once, to nearest; what then is subnormal is 0. A number that would round up to the least
    // normal one only because its last bits are lost is too small as well.
    static float multiply_add(float a, float b, float c) {
        constexpr float kLeast = 0x1p-126f, kUp = 0x1p64f;
        c = flushed(c);
        const float result = std::fma(a, b, c);
        if (!(std::fabs(result) <= kLeast)) return result;
        const float scaled = std::fma(a * kUp, b, c * kUp);
        return std::fabs(scaled) < kLeast * kUp ? std::copysign(0.0f, result) : result;
    }
    static float sum(float a, float b) { return multiply_add(flushed(a), 1.0f, b); }

    template <class Weight>
    static void dot_bytes(int c, int a, int b) {
        check_product(c, a, b);
        for (int m = 0; m < rows(c); ++m) {
            for (int n = 0; n < row_bytes(c) / 4; ++n) {
                uint32_t total;
                uint8_t* place = own().bytes[c][m] + 4 * n;
                std::memcpy(&total, place, sizeof total);
                for (int i = 0; i < row_bytes(a); ++i) {
                    const auto x = static_cast<int8_t>(own().bytes[a][m][i]);
                    const auto w = static_cast<Weight>(own().bytes[b][i / 4][4 * n + i % 4]);
                    total += static_cast<uint32_t>(x * w);
                }
                std::memcpy(place, &total, sizeof total);
            }
        }
        clear_rest(c);
    }
};

}  // namespace quire
