// Attention with AVX-512: 32 registers of 16 floats. Included by the variants with and without dots of
// bfloat16, below their target pragmas.
#pragma once

namespace quire {
namespace {

struct Isa {
    using F = __m512;
    typedef int32_t I __attribute__((vector_size(64)));
    static constexpr int kLanes = 16, kTileRows = 6, kWideRows = 6;
#ifdef QUIRE_BFLOAT16_DOTS
    static constexpr const char* kName = "avx512_bf16";
#else
    static constexpr const char* kName = "avx512";
#endif

    static inline F all(float value) { return _mm512_set1_ps(value); }
    static inline F load(const void* at) { return _mm512_loadu_ps(at); }
    static inline void store(float* at, F values) { _mm512_storeu_ps(at, values); }
    static inline I load_words(const void* at) { return words_of(_mm512_loadu_si512(at)); }
    static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
    static inline I where_at_least(F x, F limit, I value) {
        const __mmask16 mask = _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ);
        return words_of(_mm512_maskz_mov_epi32(mask, raw(value)));
    }
    static inline F float16_of(I words) {
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(raw(words)));
    }
    static inline F load_bfloat16(const void* at) {
        const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(at));
        return reinterpret_cast<F>(words_of(_mm512_cvtepu16_epi32(halves)) << 16);
    }
    static inline F load_float16(const void* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
    }
    static inline F load_int8(const void* at) {
        const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(at));
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }

#ifdef QUIRE_BFLOAT16_DOTS
    static inline I all_word(const void* at) {
        int32_t word;
        std::memcpy(&word, at, sizeof word);
        return words_of(_mm512_set1_epi32(word));
    }
    static inline void store_words(void* at, I words) { _mm512_storeu_si512(at, raw(words)); }
    static inline F dot(F sum, I a, I b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
    // Two rows' numbers side by side, those of `first` in the lower halves.
    static inline I pairs(const void* first, const void* second) {
        return words_of(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(first)))) |
               words_of(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(second))))
                   << 16;
    }
    static inline void store_bfloat16(void* at, F values) {
        const __m256bh halves = _mm512_cvtneps_pbh(values);
        std::memcpy(at, &halves, sizeof halves);
    }
#endif

   private:
    static inline __m512i raw(I words) { return reinterpret_cast<__m512i>(words); }
    static inline I words_of(__m512i bits) { return reinterpret_cast<I>(bits); }
};

}  // namespace
}  // namespace quire
