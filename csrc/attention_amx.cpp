// Attention with AMX (Intel from Sapphire Rapids): keys and values of bfloat16 in products of tiles; others
// as avx512_bf16 does it.
#include "variants.h"

#ifdef QUIRE_X86_VARIANTS
#include "amx_blocks.h"
#include "attention_kernels.h"
#include "elements.h"

#include <cstring>
#include <immintrin.h>
#include <type_traits>
#include <utility>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")

#define QUIRE_BFLOAT16_DOTS
#define QUIRE_OTHER_FORMATS kAttentionAvx512
#define QUIRE_AMX
#include "attention_avx512.inc.h"
#include "attention_tiles.inc.h"

namespace quire {
const AttentionKernels kAttentionAmx = kKernels;
}
#endif
