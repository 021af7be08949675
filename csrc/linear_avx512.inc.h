// AVX-512 with VNNI: 32 registers of 16 floats, and 64 products of bytes in one instruction.
// Included by the variants with and without dots of bfloat16, below their target pragmas.
#pragma once

#define QUIRE_HALF_TILES

#include <immintrin.h>

#include <cstdint>

namespace quire {
namespace {

struct Isa {
    using F = __m512;
    // Not __m512i, which is made of 64-bit integers: GCC 12 then keeps two copies of each sum.
    typedef int32_t I __attribute__((vector_size(64)));
    static inline __m512i raw(I words) { return reinterpret_cast<__m512i>(words); }
    static inline I words_of(__m512i bits) { return reinterpret_cast<I>(bits); }

    static constexpr int64_t kLanes = 16, kTileRows = 6, kWideRows = 6;
    static constexpr bool kSplitsPairs = false;
    static constexpr int kVectors = 4;
    static constexpr int32_t kInt8Offset = 128;  // vpdpbusd multiplies unsigned by signed bytes
#if defined(QUIRE_AMX)
    static constexpr const char* kName = "amx";
#elif defined(QUIRE_BFLOAT16_DOTS)
    static constexpr const char* kName = "avx512_bf16";
#else
    static constexpr const char* kName = "avx512";
#endif

    static inline F zero() { return _mm512_setzero_ps(); }
    static inline F all(float value) { return _mm512_set1_ps(value); }
    static inline I all(int32_t value) { return words_of(_mm512_set1_epi32(value)); }
    static inline I all_word(const void* at) {
        int32_t word;
        __builtin_memcpy(&word, at, sizeof word);
        return all(word);
    }
    static inline F load(const void* at) { return _mm512_loadu_ps(at); }
    static inline void store(float* at, F values) { _mm512_storeu_ps(at, values); }
    static inline void store_words(void* at, I words) { _mm512_storeu_si512(at, raw(words)); }
    static inline I load_words(const void* at) { return words_of(_mm512_loadu_si512(at)); }
    static inline F load_halves(const void* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
    }
    static inline F widen_bfloat16(const void* at) {
        const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(at));
        return low_halves(words_of(_mm512_cvtepu16_epi32(halves)));
    }
    // Pairs of e4m3 as float16 of the same exponent bits, widened: 2^8 too small.
    static inline void load_float8(const uint8_t* at, F& even, F& odd) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xBF80));
        const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1);
        even = _mm512_cvtph_ps(_mm256_and_si256(low, mask));
        odd = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(pairs, 1), mask));
    }
    template <int kBits>
    static inline I shift_right(I words) {
        return words >> kBits;
    }
    template <int kBits>
    static inline I shift_left(I words) {
        return words << kBits;
    }
    static inline I load_bytes(const uint8_t* at) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return words_of(_mm512_cvtepu8_epi32(bytes));
    }
    static inline F as_floats(I words) { return reinterpret_cast<F>(words); }
    static inline F minus(F values) { return -values; }
    static inline I look_up(const uint8_t* table, I codes) {
        const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return words_of(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), raw(codes)));
    }
    // Multiplies the low halves of bytes by their own multiple in words of 16 bits, and adds the
    // start, for MultiplesWeight.
    struct Multiples {
        I own, starts;
    };
    // codes: in the lowest 4 bits of each word.
    static inline Multiples multiples(I codes) {
        const __m512i all_bytes = _mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0);
        const __m512i bytes = _mm512_shuffle_epi8(raw(codes), all_bytes);
        const __m512i own = raw((words_of(bytes) & 0x07070707) + 0x01010101);
        const __mmask64 is_above = _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(kAboveBit));
        const __m512i starts =
            _mm512_sub_epi8(_mm512_set1_epi8(kMultipleBias), raw(words_of(own) << 3));
        return {words_of(own) & 0x00FF00FF,
                words_of(_mm512_mask_add_epi8(starts, is_above, starts, own))};
    }
    // Two products of at most 15 * 8 in 16 bits.
    static inline I multiplied(I words, const Multiples& multiples) {
        const __m512i products = _mm512_mullo_epi16(raw(low_nibbles(words)), raw(multiples.own));
        return words_of(_mm512_add_epi8(raw(multiples.starts), products));
    }
    static inline F low_halves(I words) { return reinterpret_cast<F>(words << 16); }
    static inline F high_halves(I words) { return reinterpret_cast<F>(words & -65536); }
    static inline I low_nibbles(I words) { return words & 0x0F0F0F0F; }
    static inline I high_nibbles(I words) { return (words >> 4) & 0x0F0F0F0F; }
    static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static inline F times(F a, F b) { return a * b; }
    // Multiplies by the power of two at or below `scale` (or 0, or a value that is not finite). The
    // result has the bits of `times`, but leaves free the ports that dots need.
    static inline F times_power(F a, F scale) {
        return _mm512_scalef_ps(a, _mm512_getexp_ps(scale));
    }
    static inline F to_float(I values) { return __builtin_convertvector(values, F); }
    static inline I dot_bytes(I sum, I w, I x) {
        return words_of(_mm512_dpbusd_epi32(raw(sum), raw(w), raw(x)));
    }
    static inline I dot_nibbles(I sum, I w, I x) { return dot_bytes(sum, w, x); }
#ifdef QUIRE_BFLOAT16_DOTS
    static inline F dot_bfloat16(F sum, I w, I x) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
    }
#endif
};

}  // namespace
}  // namespace quire
