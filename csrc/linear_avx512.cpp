// Linear layers with AVX-512 and VNNI (Intel from Cascade Lake, AMD from Zen 4).
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include "linear_avx512.inc.h"
#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearAvx512 = kKernels;
}
#endif
