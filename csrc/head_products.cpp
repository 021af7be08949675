#include "head_products.h"

#include <algorithm>
#include <type_traits>

#include "arena.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr int64_t kRowsAtOnce = 64;    // whose operand a thread prepares
constexpr int64_t kPartsPerThread = 4;
constexpr int64_t kAloneProducts = 1 << 17;  // that one thread does before another wakes

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [begin, end) of a matrix.
template <class M>
M rows_of(const M& all, int64_t begin, int64_t end) {
    const int64_t size = all.element == Element::kFloat32 ? 4 : 2;
    using Bytes = std::conditional_t<std::is_same_v<M, Matrix>, const uint8_t, uint8_t>;
    auto* data = static_cast<Bytes*>(all.data) + begin * all.stride * size;
    return {all.element, end - begin, all.columns, all.stride, data};
}

// The rows as the multiplication reads them, in memory that the thread's next call overwrites.
Operand operand_of(const PackedWeight& weight, const Matrix& x) {
    thread_local Arena memory;
    const LinearKernels& kernels = linear_kernels(weight.variant);
    const int64_t row_bytes = kernels.operand_bytes(weight, x);
    if (row_bytes == 0) {
        const int64_t size = x.element == Element::kFloat32 ? 4 : 2;
        return {x.rows, x.stride * size, static_cast<const uint8_t*>(x.data), nullptr, nullptr};
    }
    const int64_t stride = up(row_bytes, 64) * 64;
    const int64_t numbers = weight.rounds_activations() ? x.rows * weight.groups() : 0;
    auto* values = reinterpret_cast<uint8_t*>(memory.get(x.rows * stride / 4 + 2 * numbers));
    auto* scales = reinterpret_cast<float*>(values + x.rows * stride);
    const MutableOperand operand{x.rows, stride, values, scales,
                                 reinterpret_cast<int32_t*>(scales + numbers)};
    kernels.prepare(operand, weight, x, 0, x.rows);
    return operand;
}

}  // namespace

void head_products(const HeadProduct* heads, int64_t count, int num_threads) {
    const PackedWeight& weight = heads->weight;
    const LinearKernels& kernels = linear_kernels(weight.variant);
    const int64_t rows = heads->x.rows, panels = up(weight.outputs, kernels.panel);
    const int64_t products = rows * count * weight.outputs * weight.inputs;
    const int threads = products < kAloneProducts ? 1 : num_threads;
    const int64_t blocks = up(rows, kRowsAtOnce), all = count * blocks;
    const int64_t parts = all == 0 ? 1 : std::clamp<int64_t>(kPartsPerThread * threads / all, 1, panels);
    parallel_stretches(all * parts, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const HeadProduct& head = heads[i / (blocks * parts)];
            const int64_t part = i / blocks % parts, row = i % blocks * kRowsAtOnce;
            const int64_t last = std::min(rows, row + kRowsAtOnce);
            kernels.multiply(rows_of(head.out, row, last), nullptr, head.weight,
                             operand_of(head.weight, rows_of(head.x, row, last)),
                             part * panels / parts, (part + 1) * panels / parts);
        }
    });
}

}  // namespace quire
