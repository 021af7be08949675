// The delta rule with AVX2 and FMA: 16 registers of 8 floats.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "elements.h"
#include "states_kernels.h"

#pragma GCC target("avx2,fma,f16c")

namespace quire {
namespace {

struct Isa {
    using F = __m256;
    static constexpr int kLanes = 8, kVectors = 2;
    static constexpr const char* kName = "avx2";

    static inline F all(float value) { return _mm256_set1_ps(value); }
    static inline F load(const float* at) { return _mm256_loadu_ps(at); }
    static inline void store(float* at, F values) { _mm256_storeu_ps(at, values); }
    static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace quire

#include "states_tiles.inc.h"

namespace quire {
const DeltaKernels kDeltaAvx2 = kKernels;
}
#endif
