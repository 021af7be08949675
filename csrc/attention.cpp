#include "attention.h"

#include <algorithm>

#include "arena.h"
#include "attention_kernels.h"
#include "parallel.h"
#include "variants.h"

namespace quire {
namespace {

constexpr int64_t kAloneTokens = 8;  // that one thread stores before another wakes

const AttentionKernels& attention_kernels(int variant) {
    if (variant < 0) variant = last_of(attention_variants());
#if defined(QUIRE_X86_VARIANTS)
#if QUIRE_HAS_VARIANT(5)
    if (variant == static_cast<int>(Variant::kAmx)) return kAttentionAmx;
#endif
#if QUIRE_HAS_VARIANT(4)
    if (variant == static_cast<int>(Variant::kAvx512Bf16)) return kAttentionAvx512Bf16;
#endif
#if QUIRE_HAS_VARIANT(3)
    if (variant == static_cast<int>(Variant::kAvx512)) return kAttentionAvx512;
#endif
#if QUIRE_HAS_VARIANT(1)
    if (variant == static_cast<int>(Variant::kAvx2)) return kAttentionAvx2;
#endif
#elif defined(QUIRE_ARM_VARIANTS)
    if (variant == static_cast<int>(Variant::kNeon)) return kAttentionNeon;
#endif
#if QUIRE_HAS_VARIANT(0)
    return kAttentionPortable;
#else
    return kAttentionAvx2;
#endif
}

}  // namespace

float* attention_scratch(int64_t floats) {
    thread_local Arena arena;
    return arena.get(floats);
}

// The others differ in products of integers, which attention does not have.
VariantSet attention_variants() {
#ifdef QUIRE_ARM_VARIANTS
    constexpr VariantSet kOwn = set_of(Variant::kPortable) | set_of(Variant::kNeon);
#else
    constexpr VariantSet kOwn = ~set_of(Variant::kAvxVnni);
#endif
    return running_variants() & kOwn;
}

const char* attention_variant_name(int variant) { return attention_kernels(variant).name; }

void paged_attention(const AttentionPlan& plan, const KvLayer& kv, const HeadRows& q,
                     const HeadRows& out, const Weighing& weighing, int num_threads, int variant,
                     float* sums) {
    thread_local Arena state_memory;
    const AttentionKernels& kernels = attention_kernels(variant);
    AttentionCall call{plan.step(),   plan.pieces().data(), plan.items().data(),
                       plan.sources().data(), plan.states(), kv, q, out, weighing, nullptr, sums};
    const int64_t heads = plan.step().kv_heads;
    call.states = state_memory.get(heads * plan.states() * call.state_size());
    const int threads = std::min(num_threads, plan.threads());
    const auto items = static_cast<int64_t>(plan.items().size());
    const int64_t units = items * heads;
    const auto unit_at = [&](int64_t i) -> AttentionUnit {
        const int32_t item = plan.order()[static_cast<size_t>(i % items)];
        return {&plan.items()[static_cast<size_t>(item)], i / items};
    };
    const int64_t stretches = num_stretches(units, threads);
    parallel_stretches(units, threads, [&](int64_t begin, int64_t end) {
        const bool is_last = stretch_ending_at(end, units, stretches) >= 0;
        for (int64_t i = begin; i < end; ++i) {
            const bool has_next = i + 1 < end || !is_last;  // usually the next unit of this stretch
            kernels.run_item(call, unit_at(i), has_next ? unit_at(i + 1) : AttentionUnit{nullptr, 0});
        }
    });
    const auto merges = static_cast<int64_t>(plan.merges().size());
    if (merges == 0) return;
    parallel_parts(merges * heads, threads, [&](int64_t part) {
        kernels.run_merge(call, plan.merges()[static_cast<size_t>(part % merges)], part / merges);
    });
}

void store_tokens(const KvLayer& kv, const HeadRows& k, const HeadRows& v, const int64_t* slots,
                  int64_t begin, int64_t end) {
    attention_kernels(-1).store_tokens(kv, k, v, slots, begin, end);
}

void store_kv(const KvLayer& kv, const HeadRows& k, const HeadRows& v, const int64_t* slots,
              int64_t count, int num_threads) {
    const auto max_threads = static_cast<int>(std::min<int64_t>(num_threads, count / kAloneTokens + 1));
    parallel_for(count, max_threads, [&](int64_t begin, int64_t end) {
        store_tokens(kv, k, v, slots, begin, end);
    });
}

}  // namespace quire
