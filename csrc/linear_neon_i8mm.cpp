// Linear layers with NEON, sdot, and the products of small matrices: smmla of bytes, bfmmla of
// bfloat16.
#include "variants.h"

#ifdef QUIRE_ARM_VARIANTS
#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"

#ifndef __clang__  // which takes the target from the command line (CMakeLists.txt)
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm+bf16")
#endif
#define QUIRE_BYTE_DOTS
#define QUIRE_BFLOAT16_DOTS
#define QUIRE_NEON_NAME "neon_i8mm"
#include "linear_neon.inc.h"
#include "linear_neon_pairs.inc.h"

namespace quire {
namespace {

using PairsFunction = void (*)(float*, const PackedWeight&, const PanelLayout&, const Operand&, int64_t,
                               int64_t, const uint8_t*);

// Null where there are no pairs of a format.
template <int kFormat>
constexpr PairsFunction pairs_function_of() {
    constexpr auto format = static_cast<WeightFormat>(kFormat);
    constexpr Values values = parts_of(format).values;
    if constexpr (format == WeightFormat::kBfloat16) {
        return dense_pairs_panel;
    } else if constexpr (values == Values::kInt8) {
        return grouped_pairs_panel<Int8Pairs, format>;
    } else if constexpr (values == Values::kInt4) {
        return grouped_pairs_panel<Int4Pairs, format>;
    } else if constexpr (values == Values::kInt4Multiples) {
        return multiplied_pairs_panel;
    } else {
        return nullptr;
    }
}

template <int... kFormats>
PairsFunction pairs_function(WeightFormat format, std::integer_sequence<int, kFormats...>) {
    constexpr PairsFunction kAll[] = {pairs_function_of<kFormats>()...};
    return kAll[static_cast<int>(format)];
}

// Null if rows are better multiplied one by one. Integers are the same either way; sums of bfloat16
// might not be, so these are in pairs always.
PairsFunction pairs_function(const PackedWeight& weight, int64_t rows) {
    if (weight.format != WeightFormat::kBfloat16 && rows == 1) return nullptr;
    const bool is_int4 = weight.parts().values == Values::kInt4;
    if (is_int4 && weight.group % Int4Pairs::kRowBytes != 0) return nullptr;
    constexpr int kCount = static_cast<int>(WeightFormat::kCount);
    return pairs_function(weight.format, std::make_integer_sequence<int, kCount>{});
}

void multiply_pairs(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
                    const Operand& x, int64_t begin, int64_t end) {
    const PairsFunction panel_of = pairs_function(weight, x.rows);
    if (panel_of == nullptr) return multiply(out, bias, weight, x, begin, end);
    alignas(64) float acc[kBlockRows * kPanel];
    const auto write = out.element == Element::kFloat32    ? write_rows<float>
                       : out.element == Element::kBfloat16 ? write_rows<Bfloat16>
                                                           : write_rows<Float16>;
    const PanelLayout layout(weight);
    for (int64_t p = begin; p < end; ++p) {
        for (int64_t row = 0; row < x.rows; row += kBlockRows) {
            const int64_t rows = x.rows - row < kBlockRows ? x.rows - row : kBlockRows;
            panel_of(acc, weight, layout, x, row, rows, weight.data + p * layout.bytes);
            write(out, bias, acc, row, rows, p * kPanel);
        }
    }
}

int64_t repeat_best(WeightFormat format, int64_t steps) {
    switch (format) {
        case WeightFormat::kBfloat16: return repeat_pairs<Bfloat16Pairs>(steps);
        case WeightFormat::kInt8: return repeat_pairs<Int8Pairs>(steps);
        case WeightFormat::kInt4: return repeat_pairs<Int4Pairs>(steps);
        default: return repeat(format, steps);
    }
}

}  // namespace

const LinearKernels kLinearNeonI8mm{Isa::kName,    kPanel,  Isa::kInt8Offset, operand_bytes,
                                    prepare, multiply_pairs, repeat_best};
}  // namespace quire
#endif
