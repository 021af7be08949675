// Linear layers with AVX2, FMA and F16C.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"
#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c")
#include "linear_avx2.inc.h"
#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearAvx2 = kKernels;
}
#endif
