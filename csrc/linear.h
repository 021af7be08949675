// Linear layers: out = x W^T + b with weights that were packed once.
// Shape legend: T rows (tokens), K inputs, N outputs, G group of inputs that share a scale.
//
// A packed weight is a row of panels. The lanes of a panel are outputs; its inputs follow one another:
//
//   panel p: outputs [p * P, (p + 1) * P)           P is the variant's (64 with AVX-512)
//     float32, float16:   for each k:      P values
//     bfloat16:           for each k pair: P times (even k, odd k)
//     int8:   for each group: P scales (bfloat16), then for each 4 inputs: P times 4 bytes
//     int4:   for each group: P scales (bfloat16), then for each 8 inputs: P times 4 bytes,
//             low halves inputs 0..3, high halves inputs 4..7
//
// So each output is a sum over k in one fixed order in one lane, whatever the number of rows: a row's
// result has the same bits alone and in any batch, on any number of threads.
#pragma once

#include <cstdint>

namespace quire {

enum class WeightFormat : int { kFloat32, kBfloat16, kFloat16, kInt8, kInt4 };
enum class Element : int { kFloat32, kBfloat16, kFloat16 };

constexpr int64_t kInt4Offset = 8;  // an int4 is stored as itself + 8

// What a packed weight is. group: inputs that share a scale (int8, int4), a multiple of 8; the last
// group is filled up with zeros. variant: index into linear_kernels.
struct PackedWeight {
    WeightFormat format;
    int variant;
    int64_t outputs;
    int64_t inputs;
    int64_t group;
    const uint8_t* data;

    int64_t groups() const { return (inputs + group - 1) / group; }
    bool is_quantised() const {
        return format == WeightFormat::kInt8 || format == WeightFormat::kInt4;
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

// Activations as the multiplication reads them. values: float32, bfloat16 or int8, `stride` bytes
// between rows. Of int8: scales[T, groups], and sums[T, groups], minus what the offset of the stored
// weights adds to the products of a group.
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
    // largest magnitude is 127.
    void (*prepare)(const MutableOperand& operand, const PackedWeight& weight, const Matrix& x,
                    int64_t begin, int64_t end);
    // All rows of the outputs of panels [begin, end). bias: [N] of out's element, or null.
    void (*multiply)(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
                     const Operand& operand, int64_t begin, int64_t end);
    // Steps of a tile whose weights and activations are in the first cache; returns the operations
    // of each. How fast they are is what `multiply` can reach.
    int64_t (*repeat)(WeightFormat format, int64_t steps);
};

// The variants that were compiled, best last. Only those below num_linear_variants() run here.
extern const LinearKernels kLinearPortable, kLinearAvx2, kLinearAvx512, kLinearAvx512Bf16;
extern const LinearKernels kLinearNeon, kLinearNeonDotprod, kLinearNeonI8mm;
const LinearKernels& linear_kernels(int variant);
int num_linear_variants();

int64_t packed_panel_bytes(const PackedWeight& weight);
int64_t packed_bytes(const PackedWeight& weight);

// data: packed_bytes(weight). weight_NK: contiguous; of the format's own element for float32,
// bfloat16 and float16. search: int4 scales are chosen for the least squared error.
void pack_weight(uint8_t* data, const PackedWeight& weight, const Matrix& weight_NK, bool search,
                 int num_threads);

// The same of rows that are blocks of 32 values already, each a float16 scale and integers of 8 or 4
// bits (ggml's Q8_0 and Q4_0): int8 or int4 with a group of 32. Integers stay, scales become bfloat16.
void pack_blocks(uint8_t* data, const PackedWeight& weight, const uint8_t* blocks,
                 int num_threads);

// out[i] = row ids[i] of the weight, with the values that it has after packing.
void unpack_rows(const MutableMatrix& out, const PackedWeight& weight, const int64_t* ids);

// out[T, N] = the operand's rows times W^T, plus bias ([N] of out's element, or null).
void multiply(const MutableMatrix& out, const PackedWeight& weight, const Operand& operand,
              const void* bias, int num_threads);

// out[T, N] = x[T, K] W^T + bias, in x's element.
void linear(const MutableMatrix& out, const PackedWeight& weight, const Matrix& x, const void* bias,
            int num_threads);

// Operations per second of `repeat`, all threads together.
double linear_peak(WeightFormat format, int variant, int num_threads);

}  // namespace quire
