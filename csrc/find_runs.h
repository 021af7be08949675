#pragma once

#include <cstdint>

namespace quire {

// Finds, for each of `count` rows of tokens, an earlier occurrence of its last tokens. places[i] is
// the end of the newest of the longest matches, or -1. Matches have at least `fewest` and at most
// `most` tokens. Matches that end more than `searched` tokens before the row's end are not found.
void find_runs(const int32_t* tokens, int64_t token_stride, const int64_t* rows,
               const int64_t* lengths, int64_t count, int64_t min_length, int64_t max_length,
               int64_t searched, int64_t* places);

}  // namespace quire
