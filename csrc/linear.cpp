#include "linear.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "parallel.h"
#include "variants.h"

namespace quire {

const LinearKernels& linear_kernels(int variant) {
#ifdef QUIRE_X86_VARIANTS
    switch (static_cast<Variant>(variant)) {
#if QUIRE_HAS_VARIANT(5)
        case Variant::kAmx: return kLinearAmx;
#endif
#if QUIRE_HAS_VARIANT(4)
        case Variant::kAvx512Bf16: return kLinearAvx512Bf16;
#endif
#if QUIRE_HAS_VARIANT(3)
        case Variant::kAvx512: return kLinearAvx512;
#endif
#if QUIRE_HAS_VARIANT(2)
        case Variant::kAvxVnni: return kLinearAvxVnni;
#endif
#if QUIRE_HAS_VARIANT(1)
        case Variant::kAvx2: return kLinearAvx2;
#endif
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
#if QUIRE_HAS_VARIANT(0)
    return kLinearPortable;
#else
    return kLinearAvx2;
#endif
}

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

constexpr int64_t kSharedRows = 64;     // at least, that a thread has of a panel which others share
constexpr int64_t kPanelsPerThread = 8;  // with fewer, some threads would have much more than others

// The division of a product among threads: by panels and, where there are few panels, also by
// blocks of rows.
struct Division {
    int64_t panels, blocks, rows;

    Division(const PackedWeight& weight, int64_t all_rows, int num_threads) : rows(all_rows) {
        const int64_t panel = linear_kernels(weight.variant).panel;
        panels = (weight.outputs + panel - 1) / panel;
        const bool are_few = num_threads > 1 && panels < kPanelsPerThread * num_threads;
        blocks = are_few ? std::max<int64_t>(1, rows / kSharedRows) : 1;
    }
    int64_t count() const { return panels * blocks; }
    int64_t first_row(int64_t block) const { return block == blocks ? rows : block * kSharedRows; }
};

// Returns the address at which a thread's stretch of a weight's panels begins.
const uint8_t* begin_of(const PackedWeight& weight, int64_t rows, int64_t stretch, int num_threads) {
    const Division parts(weight, rows, num_threads);
    const int64_t stretches = num_stretches(parts.count(), num_threads);
    const int64_t own = std::min(stretch, stretches - 1);
    const int64_t first = begin_of_stretch(own, parts.count(), stretches);
    return weight.data + first / parts.blocks * packed_panel_bytes(weight);
}

Operand rows_of(const Operand& x, const PackedWeight& weight, int64_t begin, int64_t end) {
    const int64_t at = weight.rounds_activations() ? begin * weight.groups() : 0;
    return {end - begin, x.stride, x.values + begin * x.stride, x.scales + at, x.sums + at};
}

MutableMatrix rows_of(const MutableMatrix& out, int64_t begin, int64_t end) {
    const int64_t at = begin * out.stride * (out.element == Element::kFloat32 ? 4 : 2);
    return {out.element, end - begin, out.columns, out.stride, static_cast<uint8_t*>(out.data) + at};
}

// Parts [begin, end): panels as a whole, but at the ends. The weight's `next` comes behind the last.
void multiply_parts(const MutableMatrix& out, const void* bias, const PackedWeight& weight,
                    const Operand& x, const Division& parts, int64_t begin, int64_t end) {
    const LinearKernels& kernels = linear_kernels(weight.variant);
    PackedWeight own = weight;
    while (begin < end) {
        const int64_t panel = begin / parts.blocks, block = begin % parts.blocks;
        const int64_t whole = block == 0 ? (end - begin) / parts.blocks : 0;
        const int64_t last = whole > 0 ? parts.blocks : std::min(parts.blocks, block + end - begin);
        begin += std::max<int64_t>(whole, 1) * (last - block);
        own.next = begin == end ? weight.next : nullptr;
        const int64_t from = parts.first_row(block), to = parts.first_row(last);
        kernels.multiply(rows_of(out, from, to), bias, own, rows_of(x, own, from, to), panel,
                         panel + std::max<int64_t>(whole, 1));
    }
}

}  // namespace

void multiply(const MutableMatrix& out, const PackedWeight& weight, const Operand& operand,
              const void* bias, int num_threads, const PackedWeight* next) {
    const Division parts(weight, operand.rows, num_threads);
    const int64_t count = parts.count(), stretches = num_stretches(count, num_threads);
    const auto work = [&](int64_t begin, int64_t end) {
        PackedWeight own = weight;  // with what its thread reads then
        const int64_t ended = stretch_ending_at(end, count, stretches);
        if (next != nullptr && ended >= 0) {
            own.next = begin_of(*next, operand.rows, ended, num_threads);
        }
        multiply_parts(out, bias, own, operand, parts, begin, end);
    };
    parallel_stretches(count, num_threads, work, parts.blocks);
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
