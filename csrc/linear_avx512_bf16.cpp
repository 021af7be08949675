// Linear layers with AVX-512, VNNI and dots of bfloat16 (AMD from Zen 4, Intel from Sapphire Rapids).
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#define QUIRE_BFLOAT16_DOTS
#define QUIRE_OTHER_FORMATS kLinearAvx512
#include "linear_avx512.inc.h"
#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearAvx512Bf16 = kKernels;
}
#endif
