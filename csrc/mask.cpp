#include <algorithm>

#include "parallel.h"
#include "row.h"
#include "sampling.h"

namespace quire {
namespace {

constexpr int64_t kBits = 32;

// Forbids the tokens, count <= 32 of them, whose bit is 0.
QUIRE_VECTOR
void mask_word(float* logits, uint32_t word, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
        logits[t] = (word >> t) & 1u ? logits[t] : -kInfinity;
    }
}

void mask_row(float* row, const int32_t* words, int64_t vocab, int64_t num_words) {
    const int64_t whole = std::min(num_words, vocab / kBits);
    for (int64_t w = 0; w < whole; ++w) {
        if (words[w] == -1) continue;
        if (words[w] == 0) {
            std::fill_n(row + w * kBits, kBits, -kInfinity);
        } else {
            mask_word(row + w * kBits, static_cast<uint32_t>(words[w]), kBits);
        }
    }
    int64_t end = whole * kBits;
    if (whole < num_words && end < vocab) {
        mask_word(row + end, static_cast<uint32_t>(words[whole]), vocab - end);
        end = vocab;
    }
    std::fill(row + end, row + vocab, -kInfinity);
}

}  // namespace

void apply_masks(float* logits, const int32_t* places, const int32_t* words, int64_t count,
                 int64_t vocab, int64_t num_words, int num_threads) {
    parallel_for(count, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            mask_row(logits + places[i] * vocab, words + i * num_words, vocab, num_words);
        }
    });
}

}  // namespace quire
