#include "program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "head_products.h"
#include "parallel.h"
#include "row_ops.h"

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

// Floats that a phase must write before its rows are shared between threads.
constexpr int64_t kAloneFloats = 8 * 1024;
constexpr int64_t kPiecesPerThread = 4;  // of rows, at least
constexpr int64_t kLineFloats = 16;

bool has_own_phase(Kind kind) {
    switch (kind) {
        case Kind::kMultiply:
        case Kind::kExperts:
        case Kind::kAttend:
        case Kind::kConvolve:
        case Kind::kDeltaRule:
        case Kind::kHeadProduct:
        case Kind::kAdapt:
        case Kind::kAllReduce: return true;
        default: return false;
    }
}

void clear_row(float* out, int64_t size) { std::fill_n(out, size, 0.0f); }

}  // namespace

Program::Program(std::vector<int64_t> widths, std::vector<int64_t> places, int64_t arena_width,
                 int attention_variant)
    : widths_(std::move(widths)),
      places_(std::move(places)),
      arena_width_(arena_width),
      attention_variant_(attention_variant),
      are_results_(widths_.size()) {}

void Program::add(const Instruction& instruction, bool begins_phase) {
    const size_t place = instructions_.size();
    if (instruction.kind == Kind::kMultiply) {
        for (size_t i = phases_.size(); i > 0 && phases_[i - 1].next_product == 0; --i) {
            phases_[i - 1].next_product = place;
        }
    }
    if (begins_phase) phases_.push_back({place, place, 0, {}, 0});
    instructions_.push_back(instruction);
    Phase& phase = phases_.back();
    phase.end = instructions_.size();
    if (has_own_phase(instruction.kind)) {
        are_results_[static_cast<size_t>(instruction.views[0].buffer)] = true;
    } else {
        for (const View& view : instruction.views) {
            if (!are_results_[static_cast<size_t>(view.buffer)]) continue;
            std::vector<int64_t>& all = phase.results;
            if (std::find(all.begin(), all.end(), view.buffer) == all.end()) all.push_back(view.buffer);
        }
    }
    phase.width += widths_[static_cast<size_t>(instruction.views[0].buffer)];
}

void Program::run(ProgramStep step, int num_threads) {
    step_ = std::move(step);
    reserve(step_.rows);
    if (phase_seconds_.empty()) {
        for (const Phase& phase : phases_) run_phase(phase, num_threads);
        return;
    }
    auto before = Clock::now();
    for (size_t i = 0; i < phases_.size(); ++i) {
        run_phase(phases_[i], num_threads);
        const auto now = Clock::now();
        phase_seconds_[i] += std::chrono::duration<double>(now - before).count();
        before = now;
    }
}

void Program::time_phases(bool on) { phase_seconds_.assign(on ? phases_.size() : 0, 0.0); }

void Program::reserve(int64_t rows) {
    if (rows <= capacity_) return;
    capacity_ = std::max(rows, 2 * capacity_);
    arena_.reset();  // before more is taken
    arena_ = huge_floats(static_cast<size_t>(arena_width_ * capacity_));
}

float* Program::row(const View& view, int64_t row) const {
    const auto buffer = static_cast<size_t>(view.buffer);
    float* begin = buffer < step_.outside.size() ? step_.outside[buffer]
                                                 : arena_.get() + places_[buffer] * step_.rows;
    return begin + row * widths_[buffer] + view.offset;
}

MutableMatrix Program::matrix(const View& view, int64_t columns) const {
    const int64_t stride = widths_[static_cast<size_t>(view.buffer)];
    return {Element::kFloat32, step_.rows, columns, stride, row(view, 0)};
}

HeadRows Program::heads(const View& view) const {
    return {Element::kFloat32, widths_[static_cast<size_t>(view.buffer)], row(view, 0)};
}

// An operand's buffer holds the values of all rows, then the scales, then the sums; or it is x itself.
MutableOperand Program::operand(const Instruction& instruction) const {
    const PackedWeight& weight = instruction.packed;
    const View& view = instruction.views[instruction.kind == Kind::kPrepare ? 0 : 1];
    const int64_t rows = step_.rows, stride = instruction.stride;
    const int64_t groups = weight.rounds_activations() ? weight.groups() : 0;
    auto* values = reinterpret_cast<uint8_t*>(row(view, 0));
    auto* scales = reinterpret_cast<float*>(values + rows * stride);
    return {rows, stride, values, scales, reinterpret_cast<int32_t*>(scales + rows * groups)};
}

void Program::run_phase(const Phase& phase, int num_threads) {
    const Instruction& first = instructions_[phase.begin];
    if (!has_own_phase(first.kind)) return run_row_phase(phase, num_threads);
    if (first.kind == Kind::kMultiply) {
        const MutableMatrix out = matrix(first.views[0], first.packed.outputs);
        const PackedWeight* next =
            phase.next_product == 0 ? nullptr : &instructions_[phase.next_product].packed;
        return multiply(out, first.packed, operand(first), first.bias, num_threads, next);
    }
    if (first.kind == Kind::kExperts) {
        const Experts& experts = experts_[static_cast<size_t>(first.layer)];
        const int64_t size = experts.experts.front().gate_up.inputs;
        Adapters* used = adapters_ == nullptr || adapters_->is_idle() ? nullptr : adapters_;
        expert_pairs_ += run_experts(matrix(first.views[0], size), experts,
                                     matrix(first.views[1], size),
                                     matrix(first.views[2], experts.all), expert_memory_, used,
                                     num_threads);
        return;
    }
    if (first.kind == Kind::kAttend) {
        const LayerCache& cache = layers_[static_cast<size_t>(first.layer)];
        const Weighing weighing{static_cast<float>(first.scale), first.soft_cap, first.weight};
        KvLayer kv = cache.kv;
        if (kv.is_latent()) kv.num_values = first.size;
        return paged_attention(*step_.groups[cache.group].plan, kv, heads(first.views[1]),
                               heads(first.views[0]), weighing, num_threads, attention_variant_);
    }
    if (first.kind == Kind::kHeadProduct) return run_heads(phase, num_threads);
    if (first.kind == Kind::kAdapt) {
        if (adapters_ == nullptr || adapters_->is_idle()) return;
        return adapters_->add(matrix(first.views[0], 0), matrix(first.views[1], 0), first.layer,
                              num_threads);
    }
    if (first.kind == Kind::kConvolve || first.kind == Kind::kDeltaRule) {
        return run_states(first, num_threads);
    }
    const int64_t count = step_.rows * widths_[static_cast<size_t>(first.views[0].buffer)];
    first.group->all_reduce(row(first.views[0], 0), count, Number::kFloat32, num_threads);
}

void Program::run_row_phase(const Phase& phase, int num_threads) {
    const int threads = step_.rows * phase.width < kAloneFloats ? 1 : num_threads;
    const auto work = [&](int64_t begin, int64_t end) {
        for (size_t i = phase.begin; i < phase.end; ++i) run_rows(instructions_[i], begin, end);
        if (num_threads == 1) return;
        for (const int64_t buffer : phase.results) take_over(buffer, begin, end);
    };
    const int64_t together = std::max<int64_t>(1, step_.rows / (kPiecesPerThread * num_threads));
    parallel_stretches(step_.rows, threads, work, together);
}

// Writes one number in each cache line of the rows back unchanged, so that this thread owns the
// line. Otherwise the next writer of results would wait. On AMD CPUs, writing a line that two
// threads hold takes up to ten times as long.
void Program::take_over(int64_t buffer, int64_t begin, int64_t end) {
    if (static_cast<size_t>(buffer) < step_.outside.size()) return;
    const float* last = row({buffer, 0}, end);
    for (volatile float* line = row({buffer, 0}, begin); line < last; line += kLineFloats) *line = *line;
}

void Program::run_states(const Instruction& i, int num_threads) {
    const LayerCache& cache = layers_[static_cast<size_t>(i.layer)];
    const StatePlan& plan = *step_.groups[cache.group].states;
    const HeadRows out = heads(i.views[0]), x = heads(i.views[1]);
    if (i.kind == Kind::kConvolve) {
        keep(i.views[1], i.size);
        return convolve(plan, cache.states, out, x, i.weight, i.size, i.heads, num_threads);
    }
    keep(i.views[2], 2 * i.delta.values);
    delta_rule(plan, cache.states, {i.delta, out, x, heads(i.views[2]), i.weight, i.bias},
               num_threads, attention_variant_);
}

void Program::run_heads(const Phase& phase, int num_threads) {
    std::vector<HeadProduct> heads;
    for (size_t i = phase.begin; i < phase.end; ++i) {
        const PackedWeight& weight = instructions_[i].packed;
        const auto& views = instructions_[i].views;
        heads.push_back({matrix(views[0], weight.outputs), weight, matrix(views[1], weight.inputs)});
    }
    head_products(heads.data(), static_cast<int64_t>(heads.size()), num_threads);
}

void Program::keep(const View& view, int64_t width) {
    KeptInputs& kept = step_.kept;
    for (int64_t i = 0; i < kept.count; ++i) {
        std::memcpy(kept.data + i * kept.stride, row(view, kept.tokens[i]),
                    static_cast<size_t>(width) * sizeof(float));
    }
    kept.data += width;
}

void Program::run_rows(const Instruction& instruction, int64_t begin, int64_t end) {
    const auto& views = instruction.views;
    if (instruction.kind == Kind::kPrepare) {
        const PackedWeight& weight = instruction.packed;
        const MutableMatrix x = matrix(views[1], weight.inputs);
        linear_kernels(weight.variant).prepare(operand(instruction), weight, x, begin, end);
    } else if (instruction.kind == Kind::kStore) {
        const LayerCache& cache = layers_[static_cast<size_t>(instruction.layer)];
        const int64_t* slots = step_.groups[cache.group].slots;
        store_tokens(cache.kv, heads(views[0]), heads(views[1]), slots, begin, end);
    } else {
        for (int64_t r = begin; r < end; ++r) run_row(instruction, r);
    }
}

int64_t Program::input(Input input, int64_t row) const {
    if (input == Input::kPositions) return step_.positions[row];
    const int64_t id = step_.ids[row], segment = id >> kSegmentBit;
    return input == Input::kSegments ? segment : id - (segment << kSegmentBit);
}

// The columns of the table that a token takes; null if its id is a token's.
const float* Program::encoded(const Instruction& i, int64_t row) const {
    const int64_t id = step_.ids[row];
    return id < 0 ? static_cast<const float*>(i.table) + (-1 - id) * i.count + i.first : nullptr;
}

void Program::run_row(const Instruction& i, int64_t r) {
    float* out = row(i.views[0], r);
    const float* x = row(i.views[1], r);
    switch (i.kind) {
        case Kind::kEmbedding: {
            const int64_t id = input(i.input, r) - i.first;
            if (id < 0 || id >= i.count) return clear_row(out, i.size);
            return look_up_row(out, i.element, i.table, id, i.size);
        }
        case Kind::kPackedRows: {
            const int64_t id = input(Input::kIds, r) - i.first, size = i.packed.inputs;
            if (id < 0 || id >= i.count) return clear_row(out, size);
            return unpack_rows({Element::kFloat32, 1, size, size, out}, i.packed, &id);
        }
        case Kind::kRotaryFactors:
            return rotary_factors(out, step_.positions + r, step_.rows, i.frequencies, i.count,
                                  i.size, i.scale);
        case Kind::kRmsNorm: return rms_norm_row(out, x, i.weight, i.heads, i.size, i.eps);
        case Kind::kSquareSum: *out = square_sum_row(x, i.size); return;
        case Kind::kRmsNormBySum:
            return rms_norm_row_by_sum(out, x, i.weight,
                                       *row(i.views[2], r) * static_cast<float>(i.scale), i.size,
                                       i.eps);
        case Kind::kAddRmsNorm:
            return add_rms_norm_row(out, row(i.views[1], r), row(i.views[2], r),
                                    row(i.views[3], r), i.weight, i.size, i.eps);
        case Kind::kLayerNorm: return layer_norm_row(out, x, i.weight, i.bias, i.size, i.eps);
        case Kind::kRotary: return rotary_row(out, x, row(i.views[2], r), i.heads, i.size);
        case Kind::kSiluMul: return silu_mul_row(out, x, i.size);
        case Kind::kGeluMul: return gelu_mul_row(out, x, i.size);
        case Kind::kGeluTanhMul: return gelu_tanh_mul_row(out, x, i.size);
        case Kind::kScale: return scale_row(out, x, static_cast<float>(i.scale), i.size);
        case Kind::kGelu: return gelu_row(out, x, i.size);
        case Kind::kGeluTanh: return gelu_tanh_row(out, x, i.size);
        case Kind::kRelu: return relu_row(out, x, i.size);
        case Kind::kAdd: return add_row(out, x, row(i.views[2], r), i.size);
        case Kind::kGatedAdd:
            return gated_add_row(out, x, row(i.views[2], r), *row(i.views[3], r), i.size);
        case Kind::kGatedNorm:
            return gated_norm_row(out, x, row(i.views[2], r), i.weight, i.heads, i.size, i.eps);
        case Kind::kSigmoidMul: return sigmoid_mul_row(out, x, row(i.views[2], r), i.size);
        case Kind::kScaleByPosition: {
            const auto periods = static_cast<double>((step_.positions[r] + 1) / i.count);
            return scale_row(out, x, static_cast<float>(1 + i.scale * std::log1p(periods)), i.size);
        }
        case Kind::kScaleByTop: return scale_by_top_row(out, x, row(i.views[2], r), i.count, i.size);
        case Kind::kCopyHeads:
            for (int64_t head = 0; head < i.heads; ++head) {
                copy_row(out + head * i.count, x + head * i.size, i.size);
            }
            return;
        case Kind::kPlace: {
            const float* from = encoded(i, r);
            return copy_row(out, from == nullptr ? x : from, i.size);
        }
        case Kind::kAddFeatures: {
            const float* features = encoded(i, r);
            if (features == nullptr) return copy_row(out, x, i.size);
            return add_row(out, x, features, i.size);
        }
        default: return;
    }
}

}  // namespace quire
