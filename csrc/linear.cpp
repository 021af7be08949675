#include "linear.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "parallel.h"
#include "stretches.h"
#include "variants.h"

namespace quire {

const LinearKernels& linear_kernels(int variant) {
#ifdef QUIRE_X86_VARIANTS
    switch (static_cast<Variant>(variant)) {
        case Variant::kAvx2: return kLinearAvx2;
        case Variant::kAvx512: return kLinearAvx512;
        case Variant::kAvx512Bf16: return kLinearAvx512Bf16;
        case Variant::kAmx: return kLinearAmx;
        default: break;
    }
#elif defined(QUIRE_ARM_VARIANTS)
    switch (static_cast<Variant>(variant)) {
        case Variant::kNeon: return kLinearNeon;
        case Variant::kNeonDotprod: return kLinearNeonDotprod;
        case Variant::kNeonI8mm: return kLinearNeonI8mm;
        default: break;
    }
#endif
    (void)variant;
    return kLinearPortable;
}

int num_linear_variants() { return static_cast<int>(best_variant()) + 1; }

namespace {

// Rows from which on threads share the preparation: below, waking them takes longer.
constexpr int64_t kAloneElements = 16 * 1024;

// Memory of one operand.
class OperandMemory {
   public:
    OperandMemory(int64_t row_bytes, int64_t rows, int64_t groups) {
        const int64_t stride = (row_bytes + 63) / 64 * 64, numbers = rows * groups;
        memory_.reset(new uint8_t[static_cast<size_t>(rows * stride + 8 * numbers + 64)]);
        uint8_t* begin = memory_.get();
        begin += (64 - reinterpret_cast<uintptr_t>(begin) % 64) % 64;
        auto* scales = reinterpret_cast<float*>(begin + rows * stride);
        operand_ = {rows, stride, begin, scales, reinterpret_cast<int32_t*>(scales + numbers)};
    }
    const MutableOperand& operand() const { return operand_; }

   private:
    std::unique_ptr<uint8_t[]> memory_;
    MutableOperand operand_;
};

int64_t panels_of(const PackedWeight& weight) {
    const int64_t panel = linear_kernels(weight.variant).panel;
    return (weight.outputs + panel - 1) / panel;
}

// Where a thread's stretch of a weight's panels begins.
const uint8_t* begin_of(const PackedWeight& weight, int64_t stretch, int num_threads) {
    const int64_t panels = panels_of(weight), stretches = num_stretches(panels, num_threads);
    const int64_t first = std::min(stretch, stretches - 1) * panels / stretches;
    return weight.data + first * packed_panel_bytes(weight);
}

}  // namespace

void multiply(const MutableMatrix& out, const PackedWeight& weight, const Operand& operand,
              const void* bias, int num_threads, const PackedWeight* next) {
    const LinearKernels& kernels = linear_kernels(weight.variant);
    const int64_t panels = panels_of(weight), stretches = num_stretches(panels, num_threads);
    parallel_stretches(panels, num_threads, [&](int64_t begin, int64_t end) {
        PackedWeight own = weight;
        const int64_t done = end * stretches / panels;
        const bool ends_stretch = done > 0 && done * panels / stretches == end;
        if (next != nullptr && ends_stretch) own.next = begin_of(*next, done - 1, num_threads);
        kernels.multiply(out, bias, own, operand, begin, end);
    });
}

void linear(const MutableMatrix& out, const PackedWeight& weight, const Matrix& x, const void* bias,
            int num_threads) {
    const LinearKernels& kernels = linear_kernels(weight.variant);
    const int64_t row_bytes = kernels.operand_bytes(weight, x);
    if (row_bytes == 0) {
        const int64_t size = x.element == Element::kFloat32 ? 4 : 2;
        const auto* values = static_cast<const uint8_t*>(x.data);
        const Operand operand{x.rows, x.stride * size, values, nullptr, nullptr};
        return multiply(out, weight, operand, bias, num_threads);
    }
    const OperandMemory memory(row_bytes, x.rows, weight.rounds_activations() ? weight.groups() : 0);
    const MutableOperand& operand = memory.operand();
    const int threads = x.rows * x.columns < kAloneElements ? 1 : num_threads;
    parallel_for(x.rows, threads, [&](int64_t begin, int64_t end) {
        kernels.prepare(operand, weight, x, begin, end);
    });
    multiply(out, weight, operand, bias, num_threads);
}

double linear_peak(WeightFormat format, int variant, int num_threads) {
    constexpr int64_t kSteps = 200'000;
    const LinearKernels& kernels = linear_kernels(variant);
    std::atomic<int64_t> operations{0};
    const auto began = std::chrono::steady_clock::now();
    parallel_for(num_threads, num_threads,
                 [&](int64_t, int64_t) { operations += kSteps * kernels.repeat(format, kSteps); });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    return static_cast<double>(operations) / took.count();
}

}  // namespace quire
