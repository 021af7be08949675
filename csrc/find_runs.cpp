#include "find_runs.h"

namespace quire {

void find_runs(const int32_t* tokens, int64_t token_stride, const int64_t* rows,
               const int64_t* lengths, int64_t count, int64_t fewest, int64_t most,
               int64_t searched, int64_t* places) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t* row = tokens + rows[i] * token_stride;
        const int64_t length = lengths[i];
        const int64_t first = length - searched > fewest ? length - searched : fewest;
        int64_t longest = fewest - 1;
        places[i] = -1;
        for (int64_t end = length - 1; end >= first && longest < most; --end) {
            int64_t run = 0;
            while (run < most && run < end && row[end - 1 - run] == row[length - 1 - run]) ++run;
            if (run > longest) {
                longest = run;
                places[i] = end;
            }
        }
    }
}

}  // namespace quire
