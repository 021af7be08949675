// The interface between the attention code of one instruction set and attention.cpp.
#pragma once

#include "attention.h"

namespace quire {

constexpr int64_t kStateHead = 16;  // floats before a state's sums: the peak and the sum of weights

// One layer's attention. states: of all heads one after the other, state_size floats each.
// The plan's lists are pointers here: no library template is to be compiled per instruction set.
struct AttentionCall {
    const AttentionStep& step;
    const QueryPiece* pieces;
    const AttentionItem* items;
    const PartialSource* sources;
    int64_t num_states;  // of one head
    const KvLayer& kv;
    const HeadRows& q;
    const HeadRows& out;
    const Weighing& weighing;
    float* states;
    float* sums;  // of results, see paged_attention

    int64_t padded_dim() const { return (kv.value_dim() + 15) / 16 * 16; }  // of a value
    int64_t state_size() const { return kStateHead + padded_dim(); }
    // Returns the state of the first query of an item's token, for span `span` of the item (0 if it
    // folds).
    float* state_of(const AttentionItem& item, int64_t head, int64_t span, int64_t token) const {
        const int64_t query = (span * item.tokens + token) * step.group;
        return states + (head * num_states + item.partial + query) * state_size();
    }
};

// An item for one KV head.
struct AttentionUnit {
    const AttentionItem* item;
    int64_t head;
};

// next: what this thread will run then, as far as is known, or no item; its keys are fetched.
struct AttentionKernels {
    const char* name;
    void (*run_item)(const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit& next);
    void (*run_merge)(const AttentionCall& call, const MergeJob& job, int64_t head);
    void (*store_tokens)(const KvLayer& kv, const HeadRows& k, const HeadRows& v,
                         const int64_t* slots, int64_t begin, int64_t end);
};

extern const AttentionKernels kAttentionPortable, kAttentionAvx2, kAttentionAvx512,
    kAttentionAvx512Bf16, kAttentionAmx, kAttentionNeon;

// This thread's memory for one item, aligned to 64 bytes; it grows and is kept.
float* attention_scratch(int64_t floats);

}  // namespace quire
