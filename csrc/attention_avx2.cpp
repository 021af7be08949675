// Attention with AVX2, FMA and F16C: 16 registers of 8 floats.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include "attention_kernels.h"
#include "elements.h"

#include <cstring>
#include <immintrin.h>
#include <type_traits>
#include <utility>

#pragma GCC target("avx2,fma,f16c")

namespace quire {
namespace {

struct Isa {
    using F = __m256;
    typedef int32_t I __attribute__((vector_size(32)));
    static constexpr int kLanes = 8, kTileRows = 6, kWideRows = 3;
    static constexpr const char* kName = "avx2";

    static inline F all(float value) { return _mm256_set1_ps(value); }
    static inline F load(const void* at) { return _mm256_loadu_ps(static_cast<const float*>(at)); }
    static inline void store(float* at, F values) { _mm256_storeu_ps(at, values); }
    static inline I load_words(const void* at) {
        return words_of(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
    }
    static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static inline F max(F a, F b) { return _mm256_max_ps(a, b); }
    static inline float largest(F x) {
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    static inline float total(F x) {
        const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
        const __m128 two = four + _mm_movehl_ps(four, four);
        return _mm_cvtss_f32(two + _mm_movehdup_ps(two));
    }
    static inline I where_at_least(F x, F limit, I value) {
        return reinterpret_cast<I>(_mm256_cmp_ps(x, limit, _CMP_GE_OQ)) & value;
    }
    static inline F float16_of(I words) {
        const __m256i low = raw(words & 0xFFFF);
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
        return _mm256_cvtph_ps(_mm256_castsi256_si128(pairs));
    }
    static inline F load_bfloat16(const void* at) {
        const __m128i halves = _mm_loadu_si128(static_cast<const __m128i*>(at));
        return reinterpret_cast<F>(words_of(_mm256_cvtepu16_epi32(halves)) << 16);
    }
    static inline F load_float16(const void* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(at)));
    }
    static inline I load_bytes(const void* at) {
        const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(at));
        return words_of(_mm256_cvtepi8_epi32(bytes));
    }

   private:
    static inline __m256i raw(I words) { return reinterpret_cast<__m256i>(words); }
    static inline I words_of(__m256i bits) { return reinterpret_cast<I>(bits); }
};

}  // namespace
}  // namespace quire

#include "attention_tiles.inc.h"

namespace quire {
const AttentionKernels kAttentionAvx2 = kKernels;
}
#endif
