#include "block_digests.h"

#include <cstring>
#include <vector>

#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <cpuid.h>
#include <immintrin.h>
#endif

// SHA-256 as FIPS 180-4 defines it. A message is padded to chunks of 64 bytes:
//
//   | parent, 32 bytes | block | 0x80 | zeros | number of bits, 8 bytes |

namespace quire {
namespace {

constexpr size_t kChunkBytes = 64, kLengthBytes = 8;

constexpr uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotated(uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

uint32_t load_big(const uint8_t* at) {
    return uint32_t(at[0]) << 24 | uint32_t(at[1]) << 16 | uint32_t(at[2]) << 8 | uint32_t(at[3]);
}

void store_big(uint32_t value, uint8_t* at) {
    for (int i = 0; i < 4; ++i) at[i] = uint8_t(value >> (24 - 8 * i));
}

// Adds the chunks of a message to the hash state of 8 words.
using AddChunks = void (*)(uint32_t* state, const uint8_t* chunks, size_t num_chunks);

void add_chunks_portable(uint32_t* state, const uint8_t* chunks, size_t num_chunks) {
    for (; num_chunks > 0; --num_chunks, chunks += kChunkBytes) {
        uint32_t words[64], s[8];
        for (int i = 0; i < 16; ++i) words[i] = load_big(chunks + 4 * i);
        for (int i = 16; i < 64; ++i) {
            const uint32_t a = words[i - 15], b = words[i - 2];
            words[i] = words[i - 16] + words[i - 7] +
                       (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) +
                       (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
        }
        std::memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; ++i) {
            const uint32_t a = s[0], e = s[4];
            const uint32_t first = s[7] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                                   ((e & s[5]) ^ (~e & s[6])) + kRounds[i] + words[i];
            const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +
                                    ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            std::memmove(s + 1, s, 7 * sizeof(uint32_t));
            s[4] += first;
            s[0] = first + second;
        }
        for (int i = 0; i < 8; ++i) state[i] += s[i];
    }
}

#ifdef QUIRE_X86_VARIANTS

// The instructions hold the state as words (a b e f) and (c d g h), the first one in the highest lane.
__attribute__((target("sha,sse4.1,ssse3"))) void add_chunks_sha_ni(uint32_t* state,
                                                                   const uint8_t* chunks,
                                                                   size_t num_chunks) {
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    auto* at = reinterpret_cast<__m128i*>(state);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(at), 0xB1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(at + 1), 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; num_chunks > 0; --num_chunks, chunks += kChunkBytes) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i words[4];  // the last 16 words of the message schedule
        for (int i = 0; i < 16; ++i) {
            __m128i& now = words[i % 4];
            if (i < 4) {
                const auto* data = reinterpret_cast<const __m128i*>(chunks) + i;
                now = _mm_shuffle_epi8(_mm_loadu_si128(data), swap);
            } else {
                const __m128i last = words[(i + 3) % 4], before = words[(i + 2) % 4];
                now = _mm_add_epi32(_mm_sha256msg1_epu32(now, words[(i + 1) % 4]),
                                    _mm_alignr_epi8(last, before, 4));
                now = _mm_sha256msg2_epu32(now, last);
            }
            const auto* rounds = reinterpret_cast<const __m128i*>(kRounds) + i;
            const __m128i sum = _mm_add_epi32(now, _mm_load_si128(rounds));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(at, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128(at + 1, _mm_alignr_epi8(high, low, 8));
}

bool has_sha_ni() {
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_SSE4_1) == 0) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_SHA) != 0;
}

AddChunks fastest() { return has_sha_ni() ? add_chunks_sha_ni : add_chunks_portable; }

#else

AddChunks fastest() { return add_chunks_portable; }

#endif

}  // namespace

void chain_digests(const uint8_t* parent, const uint8_t* blocks, size_t num_blocks,
                   size_t block_bytes, uint8_t* digests, bool is_portable) {
    static const AddChunks chosen = fastest();
    const AddChunks add_chunks = is_portable ? add_chunks_portable : chosen;
    const size_t size = kDigestBytes + block_bytes;
    const size_t num_chunks = (size + kLengthBytes) / kChunkBytes + 1;
    std::vector<uint8_t> message(num_chunks * kChunkBytes);
    message[size] = 0x80;
    for (size_t i = 0; i < kLengthBytes; ++i) {
        message[message.size() - 1 - i] = uint8_t(uint64_t(size) * 8 >> 8 * i);
    }
    for (size_t n = 0; n < num_blocks; ++n, blocks += block_bytes, digests += kDigestBytes) {
        std::memcpy(message.data(), parent, kDigestBytes);
        std::memcpy(message.data() + kDigestBytes, blocks, block_bytes);
        uint32_t state[8];
        std::memcpy(state, kStart, sizeof state);
        add_chunks(state, message.data(), num_chunks);
        for (int i = 0; i < 8; ++i) store_big(state[i], digests + 4 * i);
        parent = digests;
    }
}

}  // namespace quire
