#include "variants.h"

namespace quire {

Variant best_variant() {
#ifdef QUIRE_X86_VARIANTS
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return Variant::kAvx512Bf16;
    if (avx512) return Variant::kAvx512;
    if (avx2) return Variant::kAvx2;
#endif
    return Variant::kPortable;
}

}  // namespace quire
