#include "step_inputs.h"

#include <algorithm>

namespace quire {

void gather_step(const StepInputs& out, const std::vector<GroupTables>& groups,
                 const RowState& state, const int32_t* rows, const int32_t* num_tokens,
                 int64_t num_rows) {
    const int64_t size = state.block_size;
    int64_t at = 0;
    for (int64_t s = 0; s < num_rows; ++s) {
        const int64_t row = rows[s], count = num_tokens[s], start = state.computed[row];
        out.query_starts[s] = static_cast<int32_t>(at);
        out.context_lens[s] = static_cast<int32_t>(start + count);
        const int32_t* tokens = state.tokens + row * state.token_stride + start;
        std::copy_n(tokens, count, out.ids + at);
        for (int64_t i = 0; i < count; ++i) out.positions[at + i] = start + i;
        for (const GroupTables& group : groups) {
            const int32_t* table = group.table + row * group.stride;
            std::copy_n(table, group.longest, group.step_table + s * group.longest);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t position = start + i;
                group.slots[at + i] = table[position / size] * size + position % size;
            }
        }
        at += count;
    }
    out.query_starts[num_rows] = static_cast<int32_t>(at);
}

}  // namespace quire
