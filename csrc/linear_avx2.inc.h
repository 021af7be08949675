// AVX2, FMA and F16C: 16 registers of 8 floats. Included by the variants with and without VNNI, below
// their target pragmas. QUIRE_AVX_VNNI: vpdpbusd(sum, w, x) multiplies 32 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace quire {
namespace {

struct Isa {
    using F = __m256;
    typedef int32_t I __attribute__((vector_size(32)));
    static inline __m256i raw(I words) { return reinterpret_cast<__m256i>(words); }
    static inline I words_of(__m256i bits) { return reinterpret_cast<I>(bits); }

    static constexpr int64_t kLanes = 8, kTileRows = 6, kWideRows = 3;
    static constexpr bool kSplitsPairs = true;  // 16 registers hold no pairs besides 12 sums
    static constexpr int kVectors = 4;
#ifdef QUIRE_AVX_VNNI
    static constexpr int32_t kInt8Offset = 128;  // vpdpbusd multiplies unsigned by signed bytes
    static constexpr const char* kName = "avx_vnni";
#else
    static constexpr int32_t kInt8Offset = 0;
    static constexpr const char* kName = "avx2";
#endif

    static inline F zero() { return _mm256_setzero_ps(); }
    static inline F all(float value) { return _mm256_set1_ps(value); }
    static inline I all(int32_t value) { return words_of(_mm256_set1_epi32(value)); }
    static inline I all_word(const void* at) {
        int32_t word;
        __builtin_memcpy(&word, at, sizeof word);
        return all(word);
    }
    static inline F load(const void* at) { return _mm256_loadu_ps(static_cast<const float*>(at)); }
    static inline void store(float* at, F values) { _mm256_storeu_ps(at, values); }
    static inline I load_words(const void* at) {
        return words_of(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
    }
    static inline F load_halves(const void* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(at)));
    }
    static inline F widen_bfloat16(const void* at) {
        const __m128i halves = _mm_loadu_si128(static_cast<const __m128i*>(at));
        return low_halves(words_of(_mm256_cvtepu16_epi32(halves)));
    }
    // Pairs of e4m3 as float16 of the same exponent bits, widened: 2^8 too small.
    static inline void load_float8(const uint8_t* at, F& even, F& odd) {
        const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        const __m128i mask = _mm_set1_epi16(static_cast<int16_t>(0xBF80));
        const __m128i low = _mm_srai_epi16(_mm_slli_epi16(pairs, 8), 1);
        even = _mm256_cvtph_ps(_mm_and_si128(low, mask));
        odd = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(pairs, 1), mask));
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
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
        return words_of(_mm256_cvtepu8_epi32(bytes));
    }
    static inline F as_floats(I words) { return reinterpret_cast<F>(words); }
    static inline F minus(F values) { return -values; }
    static inline I look_up(const uint8_t* table, I codes) {
        const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return words_of(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row), raw(codes)));
    }
    static inline F low_halves(I words) { return reinterpret_cast<F>(words << 16); }
    static inline F high_halves(I words) { return reinterpret_cast<F>(words & -65536); }
    static inline I low_nibbles(I words) { return words & 0x0F0F0F0F; }
    static inline I high_nibbles(I words) { return (words >> 4) & 0x0F0F0F0F; }
    static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static inline F times(F a, F b) { return a * b; }
    static inline F to_float(I values) { return __builtin_convertvector(values, F); }

#ifdef QUIRE_AVX_VNNI
    static inline I dot_bytes(I sum, I w, I x) {
        return words_of(vpdpbusd(raw(sum), raw(w), raw(x)));
    }
    static inline I dot_nibbles(I sum, I w, I x) { return dot_bytes(sum, w, x); }
#else
    // vpmaddubsw multiplies unsigned by signed bytes and adds two products in 16 bits, where full
    // operands of 8 bits would overflow. |w| times x with w's sign is at most 127 * 127, twice that
    // fits.
    static inline I dot_bytes(I sum, I w, I x) {
        const __m256i signed_x = _mm256_sign_epi8(raw(x), raw(w));
        return dot_nibbles(sum, words_of(_mm256_abs_epi8(raw(w))), words_of(signed_x));
    }
    static inline I dot_nibbles(I sum, I w, I x) {
        const __m256i pairs = _mm256_maddubs_epi16(raw(w), raw(x));
        return sum + words_of(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#endif
};

}  // namespace
}  // namespace quire
