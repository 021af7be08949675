// Activations as the products read them: included by linear_tiles.inc.h.
#pragma once

namespace quire {
namespace {

constexpr int32_t kScaleBit = 1 << 22;  // of a float32: the highest bit of its mantissa

constexpr bool kReadsBfloat16 = sizeof(typename Bfloat16Weight::X) == 2;

bool reads_bfloat16(const PackedWeight& weight) {
    return kReadsBfloat16 && weight.format == WeightFormat::kBfloat16;
}

int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

// bfloat16 inputs that are multiplied together; a row is padded to a multiple of them.
#ifdef QUIRE_AMX
constexpr int64_t kBfloat16Inputs = 32;
#else
constexpr int64_t kBfloat16Inputs = 2;
#endif

int64_t filled(int64_t inputs) {
    return (inputs + kBfloat16Inputs - 1) / kBfloat16Inputs * kBfloat16Inputs;
}

// Bytes between rows that take so many: where a tile has 16 rows, these are not to share a few sets of
// the first cache.
int64_t spread(int64_t bytes) {
#ifdef QUIRE_AMX
    if (bytes % 1024 == 0) return bytes + 64;
#endif
    return bytes;
}

// A row of integers for products with multiples is followed by its sums times -8, by part.
int64_t part_sum_bytes(const PackedWeight& weight) {
    const bool has_multiples = weight.parts().values == Values::kInt4Multiples;
    return has_multiples ? weight.groups() * kMultipleParts * 4 : 0;
}

// out: [groups, kMultipleParts], -8 times what the row's integers add up to.
void sum_parts(int32_t* out, const int8_t* values, int64_t groups) {
    for (int64_t i = 0; i < groups * kMultipleParts; ++i, values += kMultipleInputs) {
        int32_t sum = 0;
        for (int64_t k = 0; k < kMultipleInputs; ++k) sum += values[k];
        out[i] = -8 * sum;
    }
}

int64_t operand_bytes(const PackedWeight& weight, const Matrix& x) {
    const int64_t padded = weight.groups() * weight.group;
    if (weight.rounds_activations()) return spread(padded + part_sum_bytes(weight));
    const bool is_float = x.element == Element::kFloat32;
    if (weight.has_groups()) return is_float && x.columns == padded ? 0 : padded * 4;
    if (reads_bfloat16(weight)) {
        const bool is_read = x.element == Element::kBfloat16 && x.columns % kBfloat16Inputs == 0;
        return is_read ? 0 : spread(filled(x.columns) * 2);
    }
    const bool pairs = weight.format != WeightFormat::kFloat32;
    if (is_float && (!pairs || x.columns % 2 == 0)) return 0;
    return even(x.columns) * 4;
}

// The bits of the largest magnitude.
template <class T>
QUIRE_INLINE int32_t peak_of(const T* x, int64_t count) {
    int32_t peak = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t magnitude = bits_of(widen(x[i])) & 0x7FFFFFFF;
        peak = magnitude > peak ? magnitude : peak;
    }
    return peak;
}

// To int8, to the nearest. Adding 1.5 * 2^23 leaves the rounded number in the lowest bits. Returns what
// they add up to.
template <class T>
QUIRE_INLINE int32_t round_inputs(int8_t* out, const T* x, int64_t count, float inverse) {
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = bits_of(widen(x[i]) * inverse + 12582912.0f);
        const auto value = static_cast<int8_t>(bits);
        out[i] = value;
        total += value;
    }
    return total;
}

// Calls each(g, count) for the groups that `inputs` fill, the last one perhaps in part. The compiler
// unrolls the usual groups, which takes half of the time.
template <class Each>
QUIRE_INLINE void for_groups(int64_t group, int64_t inputs, const Each& each) {
    const int64_t whole = inputs / group;
    const auto all = [&](auto count) __attribute__((always_inline)) {
        for (int64_t g = 0; g < whole; ++g) each(g, count);
    };
    switch (group) {
        case 16: all(std::integral_constant<int64_t, 16>{}); break;
        case 32: all(std::integral_constant<int64_t, 32>{}); break;
        case 64: all(std::integral_constant<int64_t, 64>{}); break;
        case 128: all(std::integral_constant<int64_t, 128>{}); break;
        default: all(group);
    }
    if (whole * group < inputs) each(whole, inputs - whole * group);
}

// A scale, rounded up to a single bit of mantissa; what is not finite stays so.
QUIRE_INLINE float rounded_scale(float scale) {
    constexpr int32_t kRest = kScaleBit - 1, kInfinite = 0x7F800000;
    const int32_t bits = bits_of(scale);
    return float_of(bits >= kInfinite ? bits : (bits + kRest) & ~kRest);
}

// Groups of a row whose scales are found together, so that divisions do not wait for one another.
constexpr int64_t kQuantisedGroups = 32;

// `inputs` of a row, at most kQuantisedGroups groups of them. factor: that of the sums.
template <class T>
void quantise_groups(int8_t* out, float* scales, int32_t* sums, const T* x, int64_t inputs,
                     int64_t group, bool rounds_scales, int32_t factor) {
    float inverses[kQuantisedGroups];
    for_groups(group, inputs, [&](int64_t g, auto count) __attribute__((always_inline)) {
        scales[g] = float_of(peak_of(x + g * group, count));
    });
    const int64_t groups = (inputs + group - 1) / group;
    for (int64_t g = 0; g < groups; ++g) {
        const float largest = scales[g], best = largest / 127.0f;
        const float scale = rounds_scales ? rounded_scale(best) : best;
        const float inverse = rounds_scales ? 1.0f / scale : 127.0f / largest;
        scales[g] = scale;
        // Below this the inverse would overflow, and all values round to nothing anyway.
        inverses[g] = largest < 1e-30f ? 0.0f : inverse;
    }
    for_groups(group, inputs, [&](int64_t g, auto count) __attribute__((always_inline)) {
        sums[g] = factor * round_inputs(out + g * group, x + g * group, count, inverses[g]);
    });
}

// Rounds a row of activations. It gathers them first if the weight's inputs were sorted.
template <class T>
void quantise_row(const MutableOperand& operand, const PackedWeight& weight, const T* x,
                  int64_t row) {
    const int64_t groups = weight.groups(), group = weight.group, max_inputs = kQuantisedGroups * group;
    const int32_t* order = weight.order();
    const bool rounds_scales = weight.rounds_scales();
    const int32_t factor = sum_factor(stored_bias(weight));
    auto* out = reinterpret_cast<int8_t*>(operand.values + row * operand.stride);
    float* scales = operand.scales + row * groups;
    int32_t* sums = operand.sums + row * groups;
    for (int64_t begin = 0; begin < weight.inputs; begin += max_inputs) {
        const int64_t left = weight.inputs - begin, count = left < max_inputs ? left : max_inputs;
        const int64_t g = begin / group;
        if (order == nullptr) {
            quantise_groups(out + begin, scales + g, sums + g, x + begin, count, group, rounds_scales,
                            factor);
        } else {
            float gathered[kQuantisedGroups * kMostOrderedGroup];
            for (int64_t i = 0; i < count; ++i) gathered[i] = widen(x[order[begin + i]]);
            quantise_groups(out + begin, scales + g, sums + g, gathered, count, group, rounds_scales,
                            factor);
        }
    }
    for (int64_t i = weight.inputs; i < groups * group; ++i) out[i] = 0;
    if (part_sum_bytes(weight) > 0) {
        sum_parts(reinterpret_cast<int32_t*>(out + groups * group), out, groups);
    }
}

template <class T>
void prepare_row(const MutableOperand& operand, const PackedWeight& weight, const T* x,
                 int64_t row) {
    if (weight.rounds_activations()) return quantise_row(operand, weight, x, row);
    uint8_t* to = operand.values + row * operand.stride;
    const int64_t count = weight.inputs;
    const int64_t padded = weight.has_groups() ? weight.groups() * weight.group : even(count);
    if (reads_bfloat16(weight)) {
        auto* out = reinterpret_cast<Bfloat16*>(to);
        for (int64_t i = 0; i < count; ++i) narrow(out[i], widen(x[i]));
        for (int64_t i = count; i < filled(count); ++i) out[i] = Bfloat16{0};
    } else {
        auto* out = reinterpret_cast<float*>(to);
        for (int64_t i = 0; i < count; ++i) out[i] = widen(x[i]);
        for (int64_t i = count; i < padded; ++i) out[i] = 0.0f;
    }
}

template <class T>
void prepare_rows(const MutableOperand& operand, const PackedWeight& weight, const Matrix& x,
                  int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        prepare_row(operand, weight, static_cast<const T*>(x.data) + row * x.stride, row);
    }
}

void prepare(const MutableOperand& operand, const PackedWeight& weight, const Matrix& x,
             int64_t begin, int64_t end) {
    switch (x.element) {
        case Element::kFloat32: return prepare_rows<float>(operand, weight, x, begin, end);
        case Element::kBfloat16: return prepare_rows<Bfloat16>(operand, weight, x, begin, end);
        default: return prepare_rows<Float16>(operand, weight, x, begin, end);
    }
}

}  // namespace
}  // namespace quire
