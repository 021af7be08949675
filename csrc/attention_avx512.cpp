// Attention with AVX-512: 32 registers of 16 floats.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include "attention_kernels.h"
#include "elements.h"

#include <cstring>
#include <immintrin.h>
#include <type_traits>
#include <utility>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

#include "attention_avx512.inc.h"
#include "attention_tiles.inc.h"

namespace quire {
const AttentionKernels kAttentionAvx512 = kKernels;
}
#endif
