// The delta rule with AVX-512: 32 registers of 16 floats.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "elements.h"
#include "states_kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

namespace quire {
namespace {

struct Isa {
    using F = __m512;
    static constexpr int kLanes = 16, kVectors = 2;
    static constexpr const char* kName = "avx512";

    static inline F all(float value) { return _mm512_set1_ps(value); }
    static inline F load(const float* at) { return _mm512_loadu_ps(at); }
    static inline void store(float* at, F values) { _mm512_storeu_ps(at, values); }
    static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace quire

#include "states_tiles.inc.h"

namespace quire {
const DeltaKernels kDeltaAvx512 = kKernels;
}
#endif
