#include "find_runs.h"

namespace quire {

void find_runs(const int32_t* tokens, int64_t token_stride, const int64_t* rows,
               const int64_t* lengths, int64_t count, int64_t min_length, int64_t max_length,
               int64_t searched, int64_t* places) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t* row = tokens + rows[i] * token_stride;
        const int64_t length = lengths[i];
        const int64_t first = length - searched > min_length ? length - searched : min_length;
        int64_t longest = min_length - 1;
        places[i] = -1;
        for (int64_t end = length - 1; end >= first && longest < max_length; --end) {
            int64_t run = 0;
            while (run < max_length && run < end && row[end - 1 - run] == row[length - 1 - run]) ++run;
            if (run > longest) {
                longest = run;
                places[i] = end;
            }
        }
    }
}

}  // namespace quire
