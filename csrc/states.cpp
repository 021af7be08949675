#include "states.h"

#include <algorithm>
#include <cmath>

#include "arena.h"
#include "elements.h"
#include "parallel.h"
#include "row_ops.h"
#include "states_kernels.h"
#include "variants.h"

namespace quire {
namespace {

constexpr float kNormEps = 1e-6f;       // of queries and keys
constexpr int64_t kKeyAlign = 16;       // floats of a cache line
constexpr int64_t kTileChannels = 256;  // of a convolution, in the first level of the cache
constexpr int64_t kFewTokens = 4;       // of a row whose heads are not cut: reading them is the work
constexpr int64_t kAloneFloats = 16 * 1024;  // that one thread works on before another wakes

const DeltaKernels& delta_kernels(int variant) {
    if (variant < 0) variant = last_of(attention_variants());
#if defined(QUIRE_X86_VARIANTS)
#if QUIRE_HAS_VARIANT(3)
    if (variant >= static_cast<int>(Variant::kAvx512)) return kDeltaAvx512;
#endif
#if QUIRE_HAS_VARIANT(1)
    if (variant == static_cast<int>(Variant::kAvx2)) return kDeltaAvx2;
#endif
#elif defined(QUIRE_ARM_VARIANTS)
    if (variant == static_cast<int>(Variant::kNeon)) return kDeltaNeon;
#endif
#if QUIRE_HAS_VARIANT(0)
    return kDeltaPortable;
#else
    return kDeltaAvx2;
#endif
}

// This thread's memory for one part of the work.
float* scratch(int64_t floats) {
    thread_local Arena arena;
    return arena.get(floats);
}

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
void widen_all(float* out, const void* from, int64_t begin, int64_t count) {
    const T* values = static_cast<const T*>(from) + begin;
    for (int64_t i = 0; i < count; ++i) out[i] = widen(values[i]);
}

template <class T>
void narrow_all(void* out, int64_t begin, const float* from, int64_t count) {
    T* values = static_cast<T*>(out) + begin;
    for (int64_t i = 0; i < count; ++i) narrow(values[i], from[i]);
}

// `count` numbers of a token, from its number `begin` on.
void read_numbers(float* out, const HeadRows& rows, int64_t token, int64_t begin, int64_t count) {
    begin += token * rows.stride;
    switch (rows.element) {
        case Element::kFloat32: return widen_all<float>(out, rows.data, begin, count);
        case Element::kBfloat16: return widen_all<Bfloat16>(out, rows.data, begin, count);
        default: return widen_all<Float16>(out, rows.data, begin, count);
    }
}

// The same where they stand, if they need no widening.
const float* numbers(float* widened, const HeadRows& rows, int64_t token, int64_t begin,
                     int64_t count) {
    if (rows.element == Element::kFloat32) {
        return static_cast<const float*>(rows.data) + token * rows.stride + begin;
    }
    read_numbers(widened, rows, token, begin, count);
    return widened;
}

void write_numbers(const HeadRows& rows, int64_t token, int64_t begin, const float* from,
                   int64_t count) {
    begin += token * rows.stride;
    switch (rows.element) {
        case Element::kFloat32: return narrow_all<float>(rows.data, begin, from, count);
        case Element::kBfloat16: return narrow_all<Bfloat16>(rows.data, begin, from, count);
        default: return narrow_all<Float16>(rows.data, begin, from, count);
    }
}

// --- convolution ---

struct Convolution {
    const StatePlan& plan;
    const StateLayer& layer;
    const HeadRows &out, &x;
    const float* weight;
    int64_t channels, width;

    // A row's way through channels [begin, begin + count).
    void run(const StateRow& row, int64_t begin, int64_t count) const {
        const bool is_direct = x.element == Element::kFloat32 && out.element == x.element;
        const int64_t past = width - 1;
        float* old = scratch((past + width + 1) * kTileChannels);
        float* ring = old + past * kTileChannels;  // inputs of other types, widened
        float* made = ring + width * kTileChannels;
        const auto input = [&](int64_t t) -> const float* {
            if (t < row.first) return old + (t - row.first + past) * kTileChannels;
            if (!is_direct) return ring + t % width * kTileChannels;
            return static_cast<const float*>(x.data) + t * x.stride + begin;
        };
        take(old, row.start, begin, count);
        const StatePiece* piece = plan.pieces().data() + row.pieces;
        for (int64_t t = row.first; t < row.end; ++t) {
            if (!is_direct) read_numbers(ring + t % width * kTileChannels, x, t, begin, count);
            const float* taps[kMostWidth];
            for (int64_t w = 0; w < width; ++w) taps[w] = input(t - past + w);
            float* to = static_cast<float*>(out.data) + t * out.stride + begin;
            convolve_row(is_direct ? to : made, taps, weight + begin, channels, width, count);
            if (!is_direct) write_numbers(out, t, begin, made, count);
            if (t + 1 < piece->end) continue;
            if (piece->block >= 0) leave(taps + 1, piece->block, begin, count);
            ++piece;
        }
    }

    // The last inputs of a state, zeros without one, to lines of kTileChannels.
    void take(float* to, int64_t block, int64_t begin, int64_t count) const {
        const int64_t past = width - 1;
        if (block < 0) return std::fill(to, to + past * kTileChannels, 0.0f);
        split_lines(to, kTileChannels, layer.of(block) + begin * past, past, count);
    }

    void leave(const float* const* from, int64_t block, int64_t begin, int64_t count) const {
        const int64_t past = width - 1;
        join_lines(layer.of(block) + begin * past, from, past, count);
    }
};

// --- delta rule ---

// A token's part of the call: unit queries and keys with their products, and gates.
void prepare_token(float* keys, float* gates, int64_t key_stride, int64_t tokens, int64_t token,
                   const DeltaRule& rule) {
    const DeltaHeads& heads = rule.heads;
    const int64_t dim = heads.key_dim;
    const float shrink = 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t head = 0; head < heads.keys; ++head) {
        float* k = keys + (head * tokens + token) * key_stride;
        float* q = k + dim;
        const auto unit = [&](float* out, int64_t begin, float length) {
            const float* x = numbers(out, rule.qkv, token, begin, dim);
            unit_row(out, x, length, dim, kNormEps);
        };
        unit(q, head * dim, shrink);
        unit(k, (heads.keys + head) * dim, 1.0f);
        q[dim] = dot_row(k, q, dim);
    }
    for (int64_t n = 0; n < heads.values; ++n) {
        float strength, time;
        read_numbers(&strength, rule.gates, token, n, 1);
        read_numbers(&time, rule.gates, token, heads.values + n, 1);
        time += rule.shift[n];
        const float softplus = time > 20.0f ? time : std::log1p(std::exp(time));
        float* pair = gates + (n * tokens + token) * 2;
        pair[0] = std::exp(-rule.rate[n] * softplus);
        pair[1] = 1.0f / (1.0f + std::exp(-strength));
    }
}

}  // namespace

void StatePlan::prepare(const StateStep& step) {
    rows_.clear();
    pieces_.clear();
    tokens_ = step.query_starts[step.num_rows];
    for (int64_t r = 0; r < step.num_rows; ++r) {
        const int64_t first = step.query_starts[r], end = step.query_starts[r + 1];
        if (first == end) continue;
        const int32_t* table = step.tables + r * step.table_stride;
        const int64_t size = step.block_size, context = step.context_lens[r];
        const int64_t offset = context - end;  // of a position from the token's place in the step
        const int64_t begin = first + offset;
        const int64_t start = begin == 0 ? -1 : table[(begin - 1) / size];
        const bool leaves = step.has_drafts == nullptr || !step.has_drafts[r];
        rows_.push_back({first, end, start, static_cast<int64_t>(pieces_.size())});
        for (int64_t b = begin / size; b * size < context; ++b) {
            pieces_.push_back({std::min((b + 1) * size, context) - offset, leaves ? table[b] : -1});
        }
    }
    std::stable_sort(rows_.begin(), rows_.end(), [](const StateRow& a, const StateRow& b) {
        return a.end - a.first > b.end - b.first;
    });
}

void convolve(const StatePlan& plan, const StateLayer& layer, const HeadRows& out,
              const HeadRows& x, const float* weight, int64_t channels, int64_t width,
              int num_threads) {
    const Convolution work{plan, layer, out, x, weight, channels, width};
    const auto rows = static_cast<int64_t>(plan.rows().size());
    const int64_t tiles = up(channels, kTileChannels);
    const bool alone = plan.tokens() * channels < kAloneFloats;
    parallel_parts(rows * tiles, alone ? 1 : num_threads, [&](int64_t part) {
        const int64_t begin = part % tiles * kTileChannels;
        work.run(plan.rows()[static_cast<size_t>(part / tiles)], begin,
                 std::min(kTileChannels, channels - begin));
    });
}

void delta_rule(const StatePlan& plan, const StateLayer& layer, const DeltaRule& rule,
                int num_threads, int variant) {
    thread_local Arena arena;
    const DeltaKernels& kernels = delta_kernels(variant);
    const DeltaHeads& heads = rule.heads;
    const int64_t tokens = plan.tokens();
    const int64_t key_stride = up(2 * heads.key_dim + 1, kKeyAlign) * kKeyAlign;
    float* keys = arena.get(tokens * (heads.keys * key_stride + 2 * heads.values));
    float* gates = keys + tokens * heads.keys * key_stride;
    const bool alone = tokens * heads.keys * key_stride < kAloneFloats;
    parallel_for(tokens, alone ? 1 : num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            prepare_token(keys, gates, key_stride, tokens, t, rule);
        }
    });
    const DeltaCall call{rule, layer, plan.pieces().data(), tokens, key_stride, keys, gates};
    const std::vector<StateRow>& rows = plan.rows();
    const auto is_long = [](const StateRow& row) { return row.end - row.first > kFewTokens; };
    const int64_t cut = std::partition_point(rows.begin(), rows.end(), is_long) - rows.begin();
    const int64_t tiles = up(heads.value_dim, kernels.columns);
    const int64_t cut_parts = cut * heads.values * tiles;
    const int64_t parts = cut_parts + (static_cast<int64_t>(rows.size()) - cut) * heads.values;
    const auto run = [&](int64_t row, int64_t head, int64_t first, int64_t end) {
        float* memory = scratch(heads.key_dim * kernels.columns);
        for (int64_t tile = first; tile < end; ++tile) {
            kernels.run(call, rows[static_cast<size_t>(row)], head, tile * kernels.columns, memory);
        }
    };
    const bool is_small = tokens * heads.memory_size() < kAloneFloats;
    parallel_parts(parts, is_small ? 1 : num_threads, [&](int64_t part) {
        if (part < cut_parts) {
            const int64_t of_head = part / tiles, tile = part % tiles;
            run(of_head / heads.values, of_head % heads.values, tile, tile + 1);
        } else {
            const int64_t of_row = part - cut_parts;
            run(cut + of_row / heads.values, of_row % heads.values, 0, tiles);
        }
    });
}

}  // namespace quire
