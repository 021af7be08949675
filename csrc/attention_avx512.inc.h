// Attention with AVX-512: 32 registers of 16 floats. Included by the variants with and without dots of
// bfloat16, below their target pragmas.
#pragma once

namespace quire {
namespace {

struct Isa {
    using F = __m512;
    typedef int32_t I __attribute__((vector_size(64)));
    static constexpr int kLanes = 16, kTileRows = 6, kWideRows = 6;
#if defined(QUIRE_AMX)
    static constexpr const char* kName = "amx";
#elif defined(QUIRE_BFLOAT16_DOTS)
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
    static inline float largest(F x) {
        const __m256 eight = _mm256_max_ps(half<0>(x), half<1>(x));
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    static inline float total(F x) {
        const __m256 eight = half<0>(x) + half<1>(x);
        const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
        const __m128 two = four + _mm_movehl_ps(four, four);
        return _mm_cvtss_f32(two + _mm_movehdup_ps(two));
    }
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
    static inline I load_bytes(const void* at) {
        const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(at));
        return words_of(_mm512_cvtepi8_epi32(bytes));
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
    // Returns the numbers of two rows in one vector, with `first` in the lower halves.
    static inline I pairs(const void* first, const void* second) {
        return words_of(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(first)))) |
               words_of(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(second))))
                   << 16;
    }
    // The same for twice as many numbers.
    static inline void store_pairs(float* to, const void* first, const void* second) {
        const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
        const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        // Places in a, and behind the 32 of a, those in b.
        const __m512i places = _mm512_mullo_epi32(count, _mm512_set1_epi32(0x10001));
        const __m512i lower = _mm512_add_epi32(places, _mm512_set1_epi32(0x200000));
        const __m512i upper = _mm512_add_epi32(places, _mm512_set1_epi32(0x300010));
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lower, b));
        _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(a, upper, b));
    }
    static inline void store_bfloat16(void* at, F values) {
        const __m256bh halves = _mm512_cvtneps_pbh(values);
        std::memcpy(at, &halves, sizeof halves);
    }
#endif

   private:
    // With a mask: of the intrinsics without one GCC 12 says that an operand is undefined.
    template <int kHalf>
    static inline __m256 half(F x) {
        return _mm512_maskz_extractf32x8_ps(0xFF, x, kHalf);
    }
    static inline __m512i raw(I words) { return reinterpret_cast<__m512i>(words); }
    static inline I words_of(__m512i bits) { return reinterpret_cast<I>(bits); }
};

}  // namespace
}  // namespace quire
