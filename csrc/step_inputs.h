// Inputs of a forward pass, gathered from the scheduled rows (runner/rows.py).
// Shape legend: R rows, M tokens a row can hold, S scheduled rows, T tokens of the step, L blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

// The state of all rows. tokens[R, M]; computed[R]: tokens whose keys and values are stored.
struct RowState {
    const int32_t* tokens;
    int64_t token_stride;
    const int64_t* computed;
    int64_t block_size;
};

// One cache group. table[R, L] of all rows; slots[T] and step_table[S, longest] are written.
struct GroupTables {
    const int32_t* table;
    int64_t stride;
    int64_t* slots;
    int32_t* step_table;
    int64_t longest;
};

// Written: ids[T], positions[T], query_starts[S + 1], context_lens[S].
struct StepInputs {
    int64_t* ids;
    int64_t* positions;
    int32_t* query_starts;
    int32_t* context_lens;
};

// rows[S], num_tokens[S]: which rows, and how many tokens of each from its computed ones on.
void gather_step(const StepInputs& out, const std::vector<GroupTables>& groups,
                 const RowState& state, const int32_t* rows, const int32_t* num_tokens,
                 int64_t num_rows);

}  // namespace quire
