#include "parallel.h"
#include "philox.h"
#include "row.h"
#include "sampling.h"

namespace quire {
namespace {

void keep_largest(std::vector<uint64_t>& keys, int64_t k) {
    std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<uint64_t>());
    keys.resize(static_cast<size_t>(k));
}

}  // namespace

// Collects what is above the k-th largest so far; most chunks hold nothing of that kind.
void top_k_keys(std::vector<uint64_t>& keys, const float* row, int64_t vocab, int64_t k) {
    keys.clear();
    float threshold = -kInfinity;
    const size_t full = static_cast<size_t>(2 * k + kChunk);
    for (int64_t first = 0; first < vocab; first += kChunk) {
        const int64_t count = std::min(kChunk, vocab - first);
        if (!(peak_of(row + first, count).value > threshold)) continue;
        for (int64_t id = first; id < first + count; ++id) {
            if (row[id] > threshold) keys.push_back(token_key(row[id], id));
        }
        if (keys.size() >= full) {
            keep_largest(keys, k);
            threshold = value_of(keys[static_cast<size_t>(k - 1)]);
        }
    }
    if (static_cast<int64_t>(keys.size()) < k) {  // some of the k are -infinity, or there is NaN
        keys.clear();
        for (int64_t id = 0; id < vocab; ++id) keys.push_back(token_key(row[id], id));
    }
    keep_largest(keys, k);
}

void top_k(float* values, int64_t* ids, const float* logits, int64_t rows, int64_t vocab, int64_t k,
           int num_threads) {
    parallel_for(rows, num_threads, [=](int64_t begin, int64_t end) {
        std::vector<uint64_t> keys;
        for (int64_t row = begin; row < end; ++row) {
            top_k_keys(keys, logits + row * vocab, vocab, k);
            std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
            for (int64_t i = 0; i < k; ++i) {
                values[row * k + i] = value_of(keys[static_cast<size_t>(i)]);
                ids[row * k + i] = id_of(keys[static_cast<size_t>(i)]);
            }
        }
    });
}

}  // namespace quire
