// Activations as the products read them: included by linear_tiles.inc.h.
#pragma once

namespace quire {
namespace {

constexpr bool kReadsBfloat16 = sizeof(typename Bfloat16Weight::X) == 2;

bool reads_bfloat16(const PackedWeight& weight) {
    return kReadsBfloat16 && weight.format == WeightFormat::kBfloat16;
}

int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

// Inputs of bfloat16 that are multiplied together; those of a row are filled up to a multiple.
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

int64_t operand_bytes(const PackedWeight& weight, const Matrix& x) {
    const int64_t padded = weight.groups() * weight.group;
    if (weight.rounds_activations()) return spread(padded);
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

// To int8, to the nearest. Adding 1.5 * 2^23 leaves the rounded number in the lowest bits.
template <class T>
QUIRE_INLINE void quantise_inputs(int8_t* out, float& scale, int32_t& sum, const T* x, int64_t count) {
    int32_t peak = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t magnitude = bits_of(widen(x[i])) & 0x7FFFFFFF;
        peak = magnitude > peak ? magnitude : peak;
    }
    // Below this the inverse would overflow, and all values round to nothing anyway.
    const float largest = float_of(peak), inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
    scale = largest / 127.0f;
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t bits = bits_of(widen(x[i]) * inverse + 12582912.0f);
        const auto value = static_cast<int8_t>(bits);
        out[i] = value;
        total += value;
    }
    sum = total;
}

// The compiler unrolls the usual groups, which takes a third of the time.
template <class T>
void quantise_group(int8_t* out, float& scale, int32_t& sum, const T* x, int64_t count) {
    switch (count) {
        case 16: return quantise_inputs(out, scale, sum, x, 16);
        case 32: return quantise_inputs(out, scale, sum, x, 32);
        case 64: return quantise_inputs(out, scale, sum, x, 64);
        case 128: return quantise_inputs(out, scale, sum, x, 128);
        default: quantise_inputs(out, scale, sum, x, count);
    }
}

// Of weights whose inputs were sorted the activations are gathered.
template <class T>
void quantise_row(const MutableOperand& operand, const PackedWeight& weight, const T* x,
                  int64_t row) {
    const int64_t groups = weight.groups(), group = weight.group;
    const int32_t* order = weight.order();
    auto* out = reinterpret_cast<int8_t*>(operand.values + row * operand.stride);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * group, left = weight.inputs - begin;
        const int64_t count = left < group ? left : group, at = row * groups + g;
        if (order == nullptr) {
            quantise_group(out + begin, operand.scales[at], operand.sums[at], x + begin, count);
            continue;
        }
        float gathered[kMostOrderedGroup];
        for (int64_t i = 0; i < count; ++i) gathered[i] = widen(x[order[begin + i]]);
        quantise_group(out + begin, operand.scales[at], operand.sums[at], gathered, count);
    }
    for (int64_t i = weight.inputs; i < groups * group; ++i) out[i] = 0;
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
