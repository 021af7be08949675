// Linear layers with AVX2 and AVX-VNNI (Intel from Alder Lake, AMD from Zen 5). Only products of
// integers differ from AVX2.
//
// Tests compile this file in two more ways, for CPUs without AVX-VNNI. QUIRE_EMULATED_AVX_VNNI has the
// instruction in plain C++. QUIRE_EVEX_AVX_VNNI has it as AVX-512 encodes it.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"
#include <immintrin.h>

#if defined(QUIRE_EMULATED_AVX_VNNI)
#pragma GCC target("avx2,fma,f16c")
#include "emulated_vnni.h"
#elif defined(QUIRE_EVEX_AVX_VNNI)
#pragma GCC target("avx2,fma,f16c,avx512vl,avx512vnni")
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif

namespace quire {
namespace {

// Adds to each 32-bit word of `sum` the four products of its unsigned bytes of w and signed bytes of x.
inline __m256i vpdpbusd(__m256i sum, __m256i w, __m256i x) {
#if defined(QUIRE_EMULATED_AVX_VNNI)
    emulated_vpdpbusd(&sum, &w, &x);
    return sum;
#elif defined(QUIRE_EVEX_AVX_VNNI)
    return _mm256_dpbusd_epi32(sum, w, x);
#else
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
}

}  // namespace
}  // namespace quire

#define QUIRE_AVX_VNNI
#define QUIRE_OTHER_FORMATS kLinearAvx2
#include "linear_avx2.inc.h"
#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearAvxVnni = kKernels;
}
#endif
