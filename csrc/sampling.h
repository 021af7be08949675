// Choosing tokens from rows of logits: one pass over a row each, several rows in parallel.
// Shapes: logits[rows, vocab] float32, contiguous. Ties go to the lowest token id everywhere.
#pragma once

#include <cstdint>

namespace quire {

// ids[rows], values[rows] = the largest logit of each row; the value is NaN if the row holds one.
void arg_max(int64_t* ids, float* values, const float* logits, int64_t rows, int64_t vocab,
             int num_threads);

// values[rows, k], ids[rows, k] = the k largest logits in falling order, 1 <= k <= vocab.
void top_k(float* values, int64_t* ids, const float* logits, int64_t rows, int64_t vocab, int64_t k,
           int num_threads);

// out[rows] = log(sum(exp(logits / temperature))), summed in double.
void log_sum_exp(double* out, const float* logits, const float* temperatures, int64_t rows,
                 int64_t vocab, int num_threads);

// ranks[rows] = how many tokens come before ids[row], plus one.
void token_rank(int64_t* ranks, const float* logits, const int64_t* ids, int64_t rows,
                int64_t vocab, int num_threads);

// ids[rows] = argmax(logits / temperature + Gumbel noise) of the tokens that the filters leave: a
// sample of softmax(logits / temperature), filtered by min-p, then top-k, then top-p. The three
// filters are arrays[rows], or all null for none. A row without a finite logit gets any id. An id is
// a column's number; the noise is that of token `first` + id.
void choose(int64_t* ids, const float* logits, const float* temperatures, const int64_t* top_k,
            const float* top_p, const float* min_p, int64_t rows, int64_t vocab, int64_t first,
            const int64_t* seeds, const int64_t* sample_index, const int64_t* positions,
            int num_threads);

// Row places[i] of the logits, i < count: -infinity for tokens that words[i] does not allow. Bit
// t % 32 of its word t / 32 stands for token t; without a word a token is forbidden. Places differ.
void apply_masks(float* logits, const int32_t* places, const int32_t* words, int64_t count,
                 int64_t vocab, int64_t num_words, int num_threads);

}  // namespace quire
