// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", 2011). The layout of key and counter is documented in src/quire/ops/sampling/philox.py.
#pragma once

#include <cstdint>

namespace quire {

// The use of the numbers; it is the last counter word, so that two uses never share a number.
constexpr uint32_t kDomainSampling = 0;

// A token chosen out of a vocabulary draws its noise from one stream.
struct Stream {
    int64_t seed;
    int64_t sample_index;
    int64_t position;
};

// Tokens whose noise is made at once; rows are cut into pieces of this many.
constexpr int64_t kChunk = 256;

// The four words of one counter, for the known-answer tests.
void philox_words(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]);

// Noise in (0, 1) of the tokens [first, first + kChunk) of a stream; first is a multiple of 4.
void uniform_chunk(const Stream& stream, int64_t first, float* out);

// out[rows, vocab] = noise of rows streams, given as three arrays.
void philox_uniform(float* out, int64_t rows, int64_t vocab, const int64_t* seeds,
                    const int64_t* sample_index, const int64_t* positions, int num_threads);

// out[rows, k] = noise of the tokens ids[rows, k] only.
void philox_uniform_at(float* out, const int64_t* ids, int64_t rows, int64_t k,
                       const int64_t* seeds, const int64_t* sample_index, const int64_t* positions);

}  // namespace quire
