// Linear layers with AMX (Intel from Sapphire Rapids), which multiplies tiles of bfloat16 and of
// bytes. All other work uses the code of avx512_bf16.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <cstring>
#include <type_traits>

#include "amx_blocks.h"
#include "elements.h"
#include "linear.h"
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#define QUIRE_BFLOAT16_DOTS
#define QUIRE_OTHER_FORMATS kLinearAvx512
#define QUIRE_AMX
#include "linear_avx512.inc.h"
#include "linear_tiles.inc.h"

#include "linear_amx_tiles.inc.h"

#include "linear_amx_groups.inc.h"

namespace quire {
namespace {

// --- all of a weight ---

using MatrixFunction = void (*)(float*, const Product&, int64_t, int64_t, const uint8_t*);

// Null where there are no tiles of a format, or of that many inputs in a block of its groups.
template <int kFormat>
MatrixFunction matrix_function_of(bool has_small_blocks) {
    constexpr auto format = static_cast<WeightFormat>(kFormat);
    constexpr FormatParts parts = parts_of(format);
    if constexpr (format == WeightFormat::kBfloat16) {
        return dense_matrices;
    } else if constexpr (parts.scales == Scales::kNone || parts.values == Values::kFloat8) {
        return nullptr;
    } else {
        if (has_small_blocks) return grouped_matrices<format>;
        if constexpr (parts.values == Values::kInt8) return large_groups<format>;
        return nullptr;
    }
}

template <int... kFormats>
MatrixFunction matrix_function(WeightFormat format, bool has_small_blocks,
                               std::integer_sequence<int, kFormats...>) {
    constexpr MatrixFunction (*kAll[])(bool) = {matrix_function_of<kFormats>...};
    return kAll[static_cast<int>(format)](has_small_blocks);
}

// Null if rows are better multiplied without tiles, which only for integers gives the same bits.
MatrixFunction matrix_function(const PackedWeight& weight, const PanelLayout& layout, int64_t rows) {
    constexpr int kCount = static_cast<int>(WeightFormat::kCount);
    if (weight.format != WeightFormat::kBfloat16 && !takes_half_tiles(rows)) return nullptr;
    return matrix_function(weight.format, has_small_blocks(weight, layout),
                           std::make_integer_sequence<int, kCount>{});
}

void multiply_matrices(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
                       const Operand& x, int64_t begin, int64_t end) {
    const PanelLayout layout(weight);
    const MatrixFunction panel_of = matrix_function(weight, layout, x.rows);
    if (panel_of == nullptr) return multiply(out, bias, weight, x, begin, end);
    alignas(64) float acc[kMatrixRows * kPanel];
    const auto write = out.element == Element::kFloat32    ? write_rows<float>
                       : out.element == Element::kBfloat16 ? write_rows<Bfloat16>
                                                           : write_rows<Float16>;
    TileConfiguration tiles;
    const Product product{weight, layout, x, tiles, weight.data + end * layout.bytes};
    for (int64_t p = begin; p < end; ++p) {
        for (int64_t row = 0; row < x.rows; row += kMatrixRows) {
            const int64_t rows = x.rows - row < kMatrixRows ? x.rows - row : kMatrixRows;
            panel_of(acc, product, row, rows, weight.data + p * layout.bytes);
            write(out, bias, acc, row, rows, p * kPanel);
        }
    }
}

// --- the limit of the arithmetic, for benchmarks ---

// Steps of a block on the same few cache lines. Returns the operations of a step.
template <class Dots>
int64_t repeat_products(int64_t steps) {
    alignas(64) static const uint8_t zeros[kDenseStep] = {};
    TileConfiguration tiles;
    tiles.set(kBlockOfRows, kTileBytes);
    unrolled<kSumTiles>(QUIRE_EACH(t) { Tiles::zero<t>(); });
    for (int64_t s = 0; s < steps; ++s) add_matrices<Dots, 2>(zeros, kTileBytes, zeros);
    constexpr int64_t kDepth = kTileBytes / (std::is_same_v<Dots, Bfloat16Dots> ? 2 : 1);
    return 2 * kBlockOfRows * Shape<2>::kColumns * kDepth;
}

int64_t repeat_matrices(WeightFormat format, int64_t steps) {
    const FormatParts& parts = parts_of(format);
    if (format == WeightFormat::kBfloat16) return repeat_products<Bfloat16Dots>(steps);
    if (parts.values == Values::kInt8) return repeat_products<UnsignedDots>(steps);
    const bool is_integer = parts.scales != Scales::kNone && parts.values != Values::kFloat8;
    return is_integer ? repeat_products<SignedDots>(steps) : repeat(format, steps);
}

}  // namespace

const LinearKernels kLinearAmx{Isa::kName, kPanel,            Isa::kInt8Offset, operand_bytes,
                               prepare,    multiply_matrices, repeat_matrices};
}  // namespace quire
#endif
