// Attention of rows with few new tokens over paged keys and values (P 4.1, eq. 4).
// Shape legend: T tokens of the step, N = K * G query heads, K KV heads, G query heads of one KV
// head, H head dim, B blocks, P tokens per block, L longest block table.
#pragma once

#include <cstdint>

namespace quire {

// tables[S, L]: block ids (row stride table_stride); query_starts[S + 1], context_lens[S]: as the
// step has them; rows[num_rows]: which of its S rows to compute. window: 0 is none. H must be a
// multiple of 32. Token stride of q is q_stride elements, its heads are contiguous.
struct PagedRows {
    const int32_t* tables;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* rows;
    int64_t num_rows;
    int64_t kv_heads;
    int64_t group;
    int64_t head_dim;
    int64_t block_size;
    int64_t num_blocks;
    int64_t table_stride;
    int64_t q_stride;
    int64_t window;
    float scale;
};

// out[T, N, H] for the tokens of the named rows; keys and values[K, B, P, H]. Sums are in float32, in
// an order that depends on the row's own positions alone: the same bits alone and in any batch.
void paged_attention(float* out, const float* q, const float* keys, const float* values,
                     const PagedRows& step, int num_threads);

// The same in bfloat16.
void paged_attention(uint16_t* out, const uint16_t* q, const uint16_t* keys, const uint16_t* values,
                     const PagedRows& step, int num_threads);

}  // namespace quire
