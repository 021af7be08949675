// Floats of 16 bits to and from float32. No branches: compilers vectorise loops over them.
#pragma once

#include <cstdint>

#include "row.h"

namespace quire {

struct Bfloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(Bfloat16 value) { return float_of(static_cast<int32_t>(value.bits) << 16); }

// Shifted into place the exponent is 112 too small, which a product corrects, for subnormals too;
// infinities and NaN get the largest exponent.
inline float widen(Float16 value) {
    const int32_t magnitude = (value.bits & 0x7FFF) << 13;
    const int32_t sign = (value.bits & 0x8000) << 16;
    const int32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
    const int32_t special = magnitude | 0x7F800000;
    return float_of((magnitude >= 0x0F800000 ? special : scaled) | sign);
}

// The factor of e4m3 numbers that were read as float16 of the same exponent bits.
constexpr float kFloat8Factor = 256.0f;

// An e4m3 that is no NaN, 2^8 too small, subnormal ones too.
inline Float16 float8_as_half(uint8_t value) {
    return {static_cast<uint16_t>((value & 0x80) << 8 | (value & 0x7F) << 7)};
}

// The nearest e4m3, ties to even; beyond 448 it is 448.
inline uint8_t float8_of(float value) {
    const int32_t sign = bits_of(value) >> 24 & 0x80, magnitude = bits_of(value) & 0x7FFFFFFF;
    const int32_t bounded = magnitude > 0x43E00000 ? 0x43E00000 : magnitude;
    const int32_t normal = ((bounded + 0x7FFFF + (bounded >> 20 & 1)) >> 20) - (120 << 3);
    // Subnormal numbers are multiples of 2^-9. Adding 1.5 * 2^23 leaves them in the lowest bits.
    const int32_t tiny = bits_of(float_of(bounded) * 512.0f + 12582912.0f) & 0xF;
    const int32_t number = bounded < 0x3C800000 ? tiny : normal;
    return static_cast<uint8_t>(sign | (magnitude > 0x7F800000 ? 0x7F : number));
}

// To the nearest, ties to even.
inline void narrow(float& out, float value) { out = value; }

inline void narrow(Bfloat16& out, float value) {
    const auto bits = static_cast<uint32_t>(bits_of(value));
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    out.bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

inline void narrow(Float16& out, float value) {
    const auto bits = static_cast<uint32_t>(bits_of(value));
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 aligns the bits of a subnormal result with the lowest bits of the sum.
    const float sum = float_of(static_cast<int32_t>(magnitude)) + 0.5f;
    const uint32_t tiny = static_cast<uint32_t>(bits_of(sum)) - 0x3F000000u;
    uint32_t half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? 0x7E00u : half;
    out.bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

}  // namespace quire
