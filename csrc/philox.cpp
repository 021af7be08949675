#include "philox.h"

#include <cstring>

#include "parallel.h"

namespace quire {
namespace {

constexpr uint32_t kMultiplierA = 0xD2511F53u, kMultiplierB = 0xCD9E8D57u;
constexpr uint32_t kWeylA = 0x9E3779B9u, kWeylB = 0xBB67AE85u;
constexpr int kRounds = 10;
constexpr int64_t kLanes = kChunk / 4;  // counters of a chunk; each gives four tokens their noise

inline void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0,
                         uint32_t k1) {
    const uint64_t a = uint64_t{kMultiplierA} * c0, b = uint64_t{kMultiplierB} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
}

// Maps 32 random bits to (0, 1). Small values keep all 32 bits, because the token with the smallest
// -log(1 - u) / p wins. Values that would round up to one become the largest float32 below one.
inline float to_unit(uint32_t bits) {
    const float unit = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
    return std::min(unit, 1.0f - 0x1p-24f);
}

}  // namespace

void philox_words(const uint32_t counter[4], const uint32_t key[2], uint32_t words[4]) {
    std::memcpy(words, counter, 4 * sizeof(uint32_t));
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < kRounds; ++round, k0 += kWeylA, k1 += kWeylB) {
        philox_round(words[0], words[1], words[2], words[3], k0, k1);
    }
}

QUIRE_VECTOR
void uniform_chunk(const Stream& stream, int64_t first, float* out) {
    // Word by word over all lanes, so that the compiler can keep each line in vector registers.
    uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        c0[lane] = static_cast<uint32_t>(first / 4 + lane);
        c1[lane] = static_cast<uint32_t>(stream.position);
        c2[lane] = static_cast<uint32_t>(stream.sample_index);
        c3[lane] = kDomainSampling;
    }
    uint32_t k0 = static_cast<uint32_t>(stream.seed);
    uint32_t k1 = static_cast<uint32_t>(static_cast<uint64_t>(stream.seed) >> 32);
    for (int round = 0; round < kRounds; ++round, k0 += kWeylA, k1 += kWeylB) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            philox_round(c0[lane], c1[lane], c2[lane], c3[lane], k0, k1);
        }
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        out[4 * lane + 0] = to_unit(c0[lane]);
        out[4 * lane + 1] = to_unit(c1[lane]);
        out[4 * lane + 2] = to_unit(c2[lane]);
        out[4 * lane + 3] = to_unit(c3[lane]);
    }
}

void philox_uniform(float* out, int64_t rows, int64_t vocab, const int64_t* seeds,
                    const int64_t* sample_index, const int64_t* positions, int num_threads) {
    const int64_t chunks = (vocab + kChunk - 1) / kChunk;  // of one row
    parallel_for(rows * chunks, num_threads, [=](int64_t begin, int64_t end) {
        float tail[kChunk];
        for (int64_t piece = begin; piece < end; ++piece) {
            const int64_t row = piece / chunks, first = piece % chunks * kChunk;
            const Stream stream{seeds[row], sample_index[row], positions[row]};
            float* target = out + row * vocab + first;
            if (first + kChunk <= vocab) {
                uniform_chunk(stream, first, target);
            } else {
                uniform_chunk(stream, first, tail);
                std::memcpy(target, tail, static_cast<size_t>(vocab - first) * sizeof(float));
            }
        }
    });
}

void philox_uniform_at(float* out, const int64_t* ids, int64_t rows, int64_t k,
                       const int64_t* seeds, const int64_t* sample_index,
                       const int64_t* positions) {
    for (int64_t row = 0; row < rows; ++row) {
        const uint64_t seed = static_cast<uint64_t>(seeds[row]);
        const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
        for (int64_t i = row * k; i < (row + 1) * k; ++i) {
            const uint32_t counter[4] = {static_cast<uint32_t>(ids[i] / 4),
                                         static_cast<uint32_t>(positions[row]),
                                         static_cast<uint32_t>(sample_index[row]), kDomainSampling};
            uint32_t words[4];
            philox_words(counter, key, words);
            out[i] = to_unit(words[ids[i] % 4]);
        }
    }
}

}  // namespace quire
