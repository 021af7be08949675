// The formats of packed weights: how numbers are stored, what they are multiplied by, and what is
// added to them.
#pragma once

#include <cstdint>

namespace quire {

// In the order of ops/weights/formats.py. Of the names, _F16, _F32: scales of that kind instead of bfloat16;
// _ZEROS: with zero points. kFloat8: e4m3. kFloat4: MXFP4. kQ...: GGUF's. kInt4Multiples: 4 bits in groups
// of 32 whose scales are small multiples of a scale for 128 inputs.
enum class WeightFormat : int {
    kFloat32, kBfloat16, kFloat16, kInt8, kInt4, kInt4Multiples,
    kFloat8, kFloat4,
    kInt8F16, kInt8F32, kInt8Zeros, kInt8F16Zeros, kInt8F32Zeros,
    kInt4F16, kInt4F32, kInt4Zeros, kInt4F16Zeros, kInt4F32Zeros,
    kQ4_1, kQ5_0, kQ5_1, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K,
    kCount,
};

enum class Values : int {
    kFloat32, kBfloat16, kFloat16, kFloat8, kFloat4, kInt4, kInt4Multiples, kInt5, kInt6, kInt8,
};

// kPower: an e8m0. kNested: an integer per group times a float16 per block of groups. kWithMultiples: a
// bfloat16 in the upper half of a word whose lower half has the multiples of the group's parts.
enum class Scales : int { kNone, kBfloat16, kFloat16, kFloat32, kPower, kNested, kWithMultiples };

// The term added to scale * integer. kZeros: -scale * zero, as bfloat16 or, with float32 scales,
// float32.
// kMinima: a float16. kNested: minus such a product.
enum class Offsets : int { kNone, kZeros, kMinima, kNested };

// signed_scales: of kNested. bias: what is multiplied is the integer plus this (of int8 the variant's).
struct FormatParts {
    Values values;
    Scales scales;
    Offsets offsets;
    int32_t bias;
    bool signed_scales;
};

constexpr int32_t kFloat4Bias = 12;  // MXFP4's largest number, doubled
constexpr int64_t kNestedInputs = 256;  // of a block of nested factors

// kInt4Multiples: integers of -8 to 7, or of -7 to 8 in parts of a group whose largest weight is
// above 0. Times a multiple of 1 to 8 they are products of 8 bits, so their sums need no scale
// within a group.
constexpr int64_t kMultipleInputs = 32, kMultipleParts = 4;  // of a part of a group, parts of a group
constexpr int64_t kMultipliedInputs = kMultipleParts * kMultipleInputs;
constexpr int32_t kMultipleBias = 64;  // of products; with it they are 0 to 120
constexpr uint32_t kAboveBit = 8;

// The meaning of a code, which has 4 bits for each part, the first part's lowest. zero: the stored
// form of the integer 0.
struct Multiple {
    constexpr Multiple(uint32_t codes, int64_t part)
        : own(static_cast<int32_t>(codes >> 4 * part & 7) + 1),
          zero((codes >> 4 * part & kAboveBit) != 0 ? 7 : 8) {}

    int32_t own, zero;
};

constexpr FormatParts kFormatParts[] = {
    {Values::kFloat32, Scales::kNone, Offsets::kNone, 0, false},
    {Values::kBfloat16, Scales::kNone, Offsets::kNone, 0, false},
    {Values::kFloat16, Scales::kNone, Offsets::kNone, 0, false},
    {Values::kInt8, Scales::kBfloat16, Offsets::kNone, 0, false},
    {Values::kInt4, Scales::kBfloat16, Offsets::kNone, 8, false},
    {Values::kInt4Multiples, Scales::kWithMultiples, Offsets::kNone, kMultipleBias, false},
    {Values::kFloat8, Scales::kFloat32, Offsets::kNone, 0, false},
    {Values::kFloat4, Scales::kPower, Offsets::kNone, kFloat4Bias, false},
    {Values::kInt8, Scales::kFloat16, Offsets::kNone, 0, false},
    {Values::kInt8, Scales::kFloat32, Offsets::kNone, 0, false},
    {Values::kInt8, Scales::kBfloat16, Offsets::kZeros, 0, false},
    {Values::kInt8, Scales::kFloat16, Offsets::kZeros, 0, false},
    {Values::kInt8, Scales::kFloat32, Offsets::kZeros, 0, false},
    {Values::kInt4, Scales::kFloat16, Offsets::kNone, 8, false},
    {Values::kInt4, Scales::kFloat32, Offsets::kNone, 8, false},
    {Values::kInt4, Scales::kBfloat16, Offsets::kZeros, 8, false},
    {Values::kInt4, Scales::kFloat16, Offsets::kZeros, 8, false},
    {Values::kInt4, Scales::kFloat32, Offsets::kZeros, 8, false},
    {Values::kInt4, Scales::kFloat16, Offsets::kMinima, 0, false},
    {Values::kInt5, Scales::kFloat16, Offsets::kNone, 16, false},
    {Values::kInt5, Scales::kFloat16, Offsets::kMinima, 0, false},
    {Values::kInt4, Scales::kNested, Offsets::kNested, 0, false},
    {Values::kInt4, Scales::kNested, Offsets::kNone, 4, true},
    {Values::kInt4, Scales::kNested, Offsets::kNested, 0, false},
    {Values::kInt5, Scales::kNested, Offsets::kNested, 0, false},
    {Values::kInt6, Scales::kNested, Offsets::kNone, 32, true},
};
static_assert(sizeof kFormatParts / sizeof *kFormatParts == static_cast<int>(WeightFormat::kCount));

constexpr const FormatParts& parts_of(WeightFormat format) {
    return kFormatParts[static_cast<int>(format)];
}

// Returns whether scales of activations are rounded up to a power of two, or 1.5 times one. Then
// products of scales need no multiplication. That adds little error to weights that quire itself
// rounds to 4 bits. Weights that came quantised keep exact scales.
constexpr bool rounds_scales(WeightFormat format) {
    return format == WeightFormat::kInt4 || format == WeightFormat::kInt4Multiples;
}

// Returns whether activations become int8, with a scale per group.
constexpr bool rounds_activations(WeightFormat format) {
    const FormatParts& parts = parts_of(format);
    return parts.scales != Scales::kNone && parts.values != Values::kFloat8;
}

constexpr int64_t bits_of(Values values) {
    switch (values) {
        case Values::kFloat32: return 32;
        case Values::kBfloat16:
        case Values::kFloat16: return 16;
        case Values::kFloat8:
        case Values::kInt8: return 8;
        case Values::kInt6: return 6;
        case Values::kInt5: return 5;
        default: return 4;
    }
}

// Words of an output that are decoded together.
constexpr int64_t words_of_step(Values values) {
    switch (values) {
        case Values::kInt4Multiples: return kMultipleInputs / 8;
        case Values::kInt5: return 5;
        case Values::kInt6: return 3;
        default: return 1;
    }
}

constexpr int64_t bytes_of(Scales scales) {
    switch (scales) {
        case Scales::kNone: return 0;
        case Scales::kFloat32:
        case Scales::kWithMultiples: return 4;
        case Scales::kPower:
        case Scales::kNested: return 1;
        default: return 2;
    }
}

constexpr int64_t bytes_of(Offsets offsets, Scales scales) {
    switch (offsets) {
        case Offsets::kNone: return 0;
        case Offsets::kZeros: return bytes_of(scales);
        case Offsets::kMinima: return 2;
        default: return 1;
    }
}

}  // namespace quire
