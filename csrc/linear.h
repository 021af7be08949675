// Linear layers: out = x W^T + b with weights that were packed once.
// Shape legend: T rows (tokens), K inputs, N outputs, G group of inputs that share a scale.
//
// A packed weight is a row of panels. The lanes of a panel are outputs; its inputs follow one another:
//
//   panel p: outputs [p * P, (p + 1) * P)           P is the variant's (64 with AVX-512)
//     float32, float16:   for each k:      P values
//     bfloat16:           for each k pair: P times (even k, odd k)
//     others: blocks of groups, of one group or, where factors are nested, of 256 inputs. A block holds
//       the outer factors (P float16, twice with offsets), then P scales and any P offsets of each of
//       its groups. Then come the values of each of its groups in words of 32 bits, P of each:
//         8 bits:  4 inputs; of float8 P times (even k, odd k) for each k pair
//         4 bits:  8 inputs: low halves of the bytes 0..3, high halves 4..7
//         5 bits:  five words hold 32 inputs (linear_codes.h), 6 bits: three words hold 16; the first
//                  quarter of the lanes has all of them, then the second, ...
//
// After the last panel stands the order of the inputs (K int32) where they were sorted: column k of the
// panels belongs to input order[k].
//
// So each output is a sum over k in a fixed order in one lane, whatever the number of rows. A row's
// result has the same bits alone and in any batch, on any number of threads.
#pragma once

#include <cstdint>

#include "linear_formats.h"

namespace quire {

enum class Element : int { kFloat32, kBfloat16, kFloat16 };

constexpr int64_t kPanelVectors = 4;  // of every variant
constexpr int64_t kPartsOfWeight = 8;  // stretches of panels that each thread takes, in the mean
constexpr int64_t kMostOrderedGroup = 128;  // inputs, where they were sorted

// A packed weight.
// group: inputs that share a scale, a multiple of 8; the last group is padded with zeros.
// variant: index into linear_kernels.
// is_ordered: whether an order of inputs follows.
// next: the address to prefetch after the last multiplied panel, if the read does not continue
// there.
struct PackedWeight {
    WeightFormat format;
    int variant;
    int64_t outputs;
    int64_t inputs;
    int64_t group;
    bool is_ordered;
    const uint8_t* data;
    const uint8_t* next = nullptr;

    const FormatParts& parts() const { return parts_of(format); }
    int64_t groups() const { return (inputs + group - 1) / group; }
    bool has_groups() const { return parts().scales != Scales::kNone; }
    bool rounds_activations() const { return quire::rounds_activations(format); }
    bool rounds_scales() const { return quire::rounds_scales(format); }
    const int32_t* order() const;  // null where inputs come as they are
};

// Offsets of a panel's factors and values, in bytes from its beginning.
struct PanelLayout {
    explicit PanelLayout(const PackedWeight& weight);

    int64_t panel, bytes;  // outputs, and bytes of all
    // Only for weights with groups, which are stored in blocks:
    int64_t groups, block_groups, header_bytes, scale_bytes, offset_bytes;
    int64_t factor_bytes;  // of a block, with the header
    int64_t group_bytes;   // of a group's values
    int64_t block_bytes;   // of all

    int64_t block(int64_t g) const { return g / block_groups * block_bytes; }
    int64_t scales(int64_t g) const {
        return block(g) + header_bytes + g % block_groups * (scale_bytes + offset_bytes);
    }
    int64_t offsets(int64_t g) const { return scales(g) + scale_bytes; }
    int64_t values(int64_t g) const {
        return block(g) + factor_bytes + g % block_groups * group_bytes;
    }
};

// Activations [T, K], contiguous within a row.
struct Matrix {
    Element element;
    int64_t rows;
    int64_t columns;
    int64_t stride;  // elements between rows
    const void* data;
};

// Results [T, N], which are written.
struct MutableMatrix {
    Element element;
    int64_t rows;
    int64_t columns;
    int64_t stride;
    void* data;

    operator Matrix() const { return {element, rows, columns, stride, data}; }
};

// Returns the factor of the sums of activations. bias: the offset of the weight's stored integers.
// Its contribution is subtracted where a group's products begin.
inline int32_t sum_factor(int32_t bias) { return bias == 0 ? 1 : -bias; }

// Activations as the multiplication reads them. values: float32, bfloat16 or int8, `stride` bytes
// between rows. Of int8: scales[T, groups], and sums[T, groups] of the integers, times sum_factor.
struct Operand {
    int64_t rows;
    int64_t stride;
    const uint8_t* values;
    const float* scales;
    const int32_t* sums;
};

// An operand that is being prepared.
struct MutableOperand {
    int64_t rows;
    int64_t stride;
    uint8_t* values;
    float* scales;
    int32_t* sums;

    operator Operand() const { return {rows, stride, values, scales, sums}; }
};

// One variant's code. A packed weight of one variant is read by that variant alone.
struct LinearKernels {
    const char* name;
    int64_t panel;        // outputs per panel
    int64_t int8_offset;  // an int8 is stored as itself + this
    // Bytes of one row's operand; 0 if it is the row itself.
    int64_t (*operand_bytes)(const PackedWeight& weight, const Matrix& x);
    // Rows [begin, end) of x become rows of the operand. int8 are rounded to nearest; each group's
    // largest magnitude is 127, or where scales are rounded 85 to 127.
    void (*prepare)(const MutableOperand& operand, const PackedWeight& weight, const Matrix& x,
                    int64_t begin, int64_t end);
    // All rows of the outputs of panels [begin, end). bias: [N] of out's element, or null.
    void (*multiply)(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
                     const Operand& operand, int64_t begin, int64_t end);
    // Steps of a tile whose weights and activations are in the first cache; returns the operations
    // of each. How fast they are is what `multiply` can reach.
    int64_t (*repeat)(WeightFormat format, int64_t steps);
};

// By variant. Only running_variants() (variants.h) run here.
extern const LinearKernels kLinearPortable, kLinearAvx2, kLinearAvxVnni, kLinearAvx512,
    kLinearAvx512Bf16, kLinearAmx;
extern const LinearKernels kLinearNeon, kLinearNeonDotprod, kLinearNeonI8mm;
const LinearKernels& linear_kernels(int variant);

int32_t stored_bias(const PackedWeight& weight);  // what is added to integers that are stored
int64_t packed_panel_bytes(const PackedWeight& weight);
int64_t packed_bytes(const PackedWeight& weight);

// The rows of a weight, contiguous in memory or in an open file from `offset`. At most one panel of
// a file is in memory at a time.
struct WeightRows {
    Element element;
    const uint8_t* memory;  // null: in the file
    int file;
    int64_t offset;
};

// Reasons why a weight could not be packed, besides the errno of an unreadable file.
constexpr int kFileEnds = -1, kNotFinite = -2;

// data: packed_bytes(weight). rows: of the format's own element for float32, bfloat16 and float16.
// Packs a weight. search: choose kInt4's scales for the least squared error, as kInt4Multiples
// always does. Returns 0 or the reason for a failure: formats with scales need finite numbers.
int pack_weight(uint8_t* data, const PackedWeight& weight, const WeightRows& rows, bool search,
                int num_threads);

// Numbers that a checkpoint stores. values: [N, K] int8, bytes of e4m3, or [N, K / 2] of two e2m1 each.
// scales: float32 [N, groups] in a format that holds them, or e8m0. zeros: float32 [N, groups], or null
// where the format has none; order: [K], or null.
struct StoredArrays {
    const void* values;
    const void* scales;
    const float* zeros;
    const int64_t* order;
};
void pack_stored(uint8_t* data, const PackedWeight& weight, const StoredArrays& from,
                 int num_threads);

// Packs rows of ggml blocks, `row_bytes` apart. The kinds are Q8_0 (kInt8F16) and Q4_0 (kInt4F16)
// in groups of 32, and the kinds that formats are named after.
void pack_blocks(uint8_t* data, const PackedWeight& weight, const uint8_t* blocks,
                 int64_t row_bytes, int num_threads);

// out[i] = row ids[i] of the weight, with the values that it has after packing.
void unpack_rows(const MutableMatrix& out, const PackedWeight& weight, const int64_t* ids);

// out[T, N] = the operand's rows times W^T, plus bias ([N] of out's element, or null). next: the weight
// of the next product, or null; each thread asks memory for the panel that it will begin with.
void multiply(const MutableMatrix& out, const PackedWeight& weight, const Operand& operand,
              const void* bias, int num_threads, const PackedWeight* next = nullptr);

// out[T, N] = x[T, K] W^T + bias, in x's element.
void linear(const MutableMatrix& out, const PackedWeight& weight, const Matrix& x, const void* bias,
            int num_threads);

// Operations per second of `repeat`, all threads together.
double linear_peak(WeightFormat format, int variant, int num_threads);

}  // namespace quire
