// Layers that keep a state: a short convolution and the gated delta rule. base.py defines their
// arithmetic, states.py the addresses of states.
// Shape legend: T tokens of the step, S rows, B blocks, P tokens per block, L longest block table,
// C channels of a convolution, W its width, K key heads, N value heads, D and E the sizes of their
// vectors.
//
// A layer's state is float32. It holds the last W - 1 inputs of its convolution, [C, W - 1], and
// then the memory of its delta rule, [N, D, E]. The memory is computed token by token, whatever the
// step. For each column e of a head, with q and k of one token,
//
//   stored = sum over d of k[d] M[d]      even d and odd d, then both, one lane per column
//   asked  = sum over d of q[d] M[d]
//   change = strength (v - decay stored)
//   out    = decay asked + (k . q) change
//   M[d]   = decay M[d] + k[d] change
//
// A column's arithmetic depends neither on other columns nor on where the step begins and ends. Its
// bits are the same alone, in any batch, chunked in any way, and on any number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"  // HeadRows

namespace quire {

// One step as one group of states sees it. tables[S, L]: block ids (row stride table_stride).
// `guessing` [S]: rows whose step verifies draft tokens and so leaves no state; null if there are
// none.
struct StateStep {
    const int32_t* tables;
    int64_t table_stride;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const bool* has_drafts;
    int64_t num_rows;
    int64_t block_size;
};

// A row's tokens up to `end`, and the block that takes the state behind them, or -1.
struct StatePiece {
    int64_t end;
    int64_t block;
};

// Step tokens [first, end) of a row. start: block of the state that it begins with, -1 for zeros.
// pieces: its first one's number.
struct StateRow {
    int64_t first;
    int64_t end;
    int64_t start;
    int64_t pieces;
};

// The rows of a step that have tokens, those with the most first. Made once per step and used by all
// layers of a cache group; its memory is kept from step to step.
class StatePlan {
   public:
    void prepare(const StateStep& step);

    const std::vector<StateRow>& rows() const { return rows_; }
    const std::vector<StatePiece>& pieces() const { return pieces_; }
    int64_t tokens() const { return tokens_; }  // of the step

   private:
    std::vector<StateRow> rows_;
    std::vector<StatePiece> pieces_;
    int64_t tokens_ = 0;
};

// The states of one layer in all blocks, [B, size].
struct StateLayer {
    float* data;
    int64_t size;

    float* of(int64_t block) const { return data + block * size; }
};

// N is a multiple of K: a head of queries and keys serves N / K heads of values.
struct DeltaHeads {
    int64_t keys, values, key_dim, value_dim;

    int64_t memory_size() const { return values * key_dim * value_dim; }
};

constexpr int64_t kMostWidth = 16;

// out = silu(x convolved along each sequence), [T, C] each. weight: [W, C], at most kMostWidth lines.
void convolve(const StatePlan& plan, const StateLayer& layer, const HeadRows& out,
              const HeadRows& x, const float* weight, int64_t channels, int64_t width,
              int num_threads);

// out [T, N, E] of queries, keys and values side by side in `qkv`, and of strengths and times, [T, 2 N],
// in `gates`. qkv and out have the same element type. rate, shift: [N]. variant: of attention's, -1 is
// the best.
struct DeltaRule {
    DeltaHeads heads;
    HeadRows out, qkv, gates;
    const float* rate;
    const float* shift;
};
void delta_rule(const StatePlan& plan, const StateLayer& layer, const DeltaRule& rule,
                int num_threads, int variant = -1);

}  // namespace quire
