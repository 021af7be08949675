// Checks the emulated tiles of AMX (emulated_tiles.h): against plain sums, and where the CPU has tiles
// also bit by bit against its own instructions, with numbers of all kinds.
//
// Prints a line for each. The exit status is 1 if something was wrong.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "check.h"
#include "emulated_tiles.h"
#include "variants.h"

namespace {

using namespace quire;

constexpr int kWords = 256;  // of a tile

enum Kind { kBfloat16, kSigned, kUnsigned, kCount };

struct Case {
    Kind kind;
    int rows, words, columns;
    bool is_wild;  // any bits, with infinities, no numbers and subnormal ones
};

void describe(const Case& c) {
    std::printf("kind %d, %d rows, %d words, %d columns", c.kind, c.rows, c.words, c.columns);
}

struct Numbers {
    alignas(64) uint32_t a[kWords], b[kWords], c[kWords];
};

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

Numbers numbers_of(const Case& c, Random& random) {
    const auto bits = [&] { return random.bits(); };
    // Near the least normal number, so that products and sums are subnormal and cancel out.
    const auto small = [&](uint32_t word) {
        const auto half = [](uint32_t h) { return (h & 0x807F) | (0x2000 - (h >> 7 & 3) * 0x80); };
        return half(word >> 16) << 16 | half(word & 0xFFFF);
    };
    Numbers n;
    for (int i = 0; i < kWords; ++i) {
        const bool is_small = c.is_wild && i % 3 != 0 && c.kind == kBfloat16;
        n.a[i] = is_small ? small(bits()) : bits();
        n.b[i] = is_small ? small(bits()) : bits();
        n.c[i] = is_small ? (bits() & 0x80FFFFFF) : bits();
        if (c.kind != kBfloat16 || c.is_wild) continue;
        const auto plain = [&] { return bits_of(random.next()) & 0xFFFF0000; };
        n.a[i] = plain() | plain() >> 16;
        n.b[i] = plain() | plain() >> 16;
        n.c[i] = bits_of(random.next());
    }
    return n;
}

template <class Tiles>
void product(uint32_t (&out)[kWords], const Case& c, const Numbers& n) {
    TileShapes shapes;
    const int rows[] = {c.rows, c.rows, c.words}, words[] = {c.columns, c.words, c.columns};
    for (int t = 0; t < 3; ++t) {
        shapes.rows[t] = static_cast<uint8_t>(rows[t]);
        shapes.row_bytes[t] = static_cast<uint16_t>(words[t] * 4);
    }
    Tiles::configure(shapes);
    Tiles::template load<0>(n.c, 64);
    Tiles::template load<1>(n.a, 64);
    Tiles::template load<2>(n.b, 64);
    switch (c.kind) {
        case kBfloat16: Tiles::template dot_bfloat16<0, 1, 2>(); break;
        case kSigned: Tiles::template dot_signed<0, 1, 2>(); break;
        default: Tiles::template dot_unsigned<0, 1, 2>(); break;
    }
    std::memset(out, 0xAB, sizeof out);  // what is not written stays
    Tiles::template store<0>(out, 64);
    Tiles::release();
}

bool is_no_number(uint32_t bits) { return (bits & 0x7FFFFFFF) > 0x7F800000; }

// Whether a number is the sum: of integers exactly, of bfloat16 nearly.
bool is_sum(const Case& c, const Numbers& n, int row, int column, uint32_t found) {
    if (c.kind != kBfloat16) {
        uint32_t sum = n.c[row * 16 + column];
        for (int i = 0; i < 4 * c.words; ++i) {
            const auto byte = [i](uint32_t word) { return word >> (i % 4 * 8) & 255; };
            const auto x = static_cast<int8_t>(byte(n.a[row * 16 + i / 4]));
            const uint32_t w = byte(n.b[i / 4 * 16 + column]);
            sum += static_cast<uint32_t>(
                x * (c.kind == kSigned ? static_cast<int8_t>(w) : static_cast<int32_t>(w)));
        }
        return found == sum;
    }
    double sum = float_of(n.c[row * 16 + column]), size = std::fabs(sum);
    for (int i = 0; i < 2 * c.words; ++i) {
        const auto half = [i](uint32_t word) {
            return float_of(i % 2 == 0 ? word << 16 : word & 0xFFFF0000);
        };
        const double product = static_cast<double>(half(n.a[row * 16 + i / 2])) *
                               half(n.b[i / 2 * 16 + column]);
        sum += product;
        size += std::fabs(product);
    }
    return std::fabs(float_of(found) - sum) <= size * 0x1p-20;
}

void check_sums(Check<Case>& check, const Case& c, const Numbers& n) {
    uint32_t out[kWords];
    product<EmulatedTiles>(out, c, n);
    bool is_right = true;
    for (int i = 0; i < kWords; ++i) {
        const int row = i / 16, column = i % 16;
        const bool is_written = row < c.rows && column < c.columns;
        is_right &= is_written ? is_sum(c, n, row, column, out[i]) : out[i] == 0xABABABAB;
    }
    check.expect(is_right, c, "not the sums");
}

// Known numbers of one row and output: how sums are ordered and rounded.
void check_order(Check<Case>& check) {
    const Case c{kBfloat16, 1, 16, 1, false};
    const auto sum = [&](float start, std::initializer_list<float> products) {
        Numbers n{};
        n.c[0] = bits_of(start);
        int i = 0;
        for (const float value : products) {
            n.a[i / 2] |= bits_of(value) >> (i % 2 == 0 ? 16 : 0);
            n.b[i / 2 * 16] |= bits_of(1.0f) >> (i % 2 == 0 ? 16 : 0);
            ++i;
        }
        uint32_t out[kWords];
        product<EmulatedTiles>(out, c, n);
        return float_of(out[0]);
    };
    const float big = 0x1p24f;
    check.expect(sum(big, {1, 0, 1, 0}) == big + 2, c, "even inputs are not summed before");
    check.expect(sum(big, {1, 1}) == big + 2, c, "even and odd ones are not summed before");
    check.expect(sum(1, {big, 0, 0, -big}) == 1, c, "what was there is not added last");
    check.expect(sum(0, {big, 1, -big, 0}) == 1, c, "odd inputs are summed with even ones");
    check.expect(sum(0, {0x1p-127f}) == 0, c, "a subnormal input is not 0");
    check.expect(sum(0x1p-127f, {}) == 0, c, "a subnormal sum is not 0");
    check.expect(sum(0, {0x1.8p-126f, 0, -0x1p-126f}) == 0, c, "a subnormal result is not 0");
}

void check_hardware(Check<Case>& check, const Case& c, const Numbers& n) {
    uint32_t out[kWords], expected[kWords];
    product<HardwareTiles>(out, c, n);
    product<EmulatedTiles>(expected, c, n);
    bool is_same = true;
    for (int i = 0; i < kWords; ++i) {
        const bool both = c.kind == kBfloat16 && is_no_number(out[i]) && is_no_number(expected[i]);
        is_same &= both || out[i] == expected[i];
    }
    check.expect(is_same, c, "other bits than the emulation");
}

template <class CheckCase>
int64_t run(const char* name, Check<Case>& check, const CheckCase& check_case, int times,
            bool has_wild) {
    Random random;
    const int shapes[][3] = {{16, 16, 16}, {1, 16, 16}, {7, 3, 16}, {16, 5, 2}, {3, 8, 16}};
    for (int kind = 0; kind < kCount; ++kind) {
        for (const auto& shape : shapes) {
            for (int i = 0; i < times; ++i) {
                const bool is_wild = has_wild && i % 2 == 1;
                const Case c{static_cast<Kind>(kind), shape[0], shape[1], shape[2], is_wild};
                check_case(check, c, numbers_of(c, random));
            }
        }
    }
    std::printf("%s: %lld checks, %lld wrong\n", name, static_cast<long long>(check.count()),
                static_cast<long long>(check.failures()));
    return check.failures();
}

}  // namespace

int main() {
    Check<Case> emulated, hardware;
    check_order(emulated);
    int64_t failures = run("emulated", emulated, check_sums, 20, false);
#ifdef QUIRE_X86_VARIANTS
    if ((running_variants() & set_of(Variant::kAmx)) != 0) {
        failures += run("hardware", hardware, check_hardware, 2000, true);
    }
#endif
    return failures == 0 ? 0 : 1;
}
