#include "variants.h"

#ifdef QUIRE_ARM_VARIANTS
#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace quire {
namespace {

#ifdef QUIRE_X86_VARIANTS

Variant best_of_cpu() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return Variant::kAvx512Bf16;
    if (avx512) return Variant::kAvx512;
    return avx2 ? Variant::kAvx2 : Variant::kPortable;
}

#elif defined(QUIRE_ARM_VARIANTS)

#ifdef __APPLE__

bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }
bool has_bf16() { return has("hw.optional.arm.FEAT_BF16"); }

#else

// Linux's numbers of the features, which older headers do not name.
bool has_dotprod() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
bool has_i8mm() { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }
bool has_bf16() { return (getauxval(AT_HWCAP2) >> 14 & 1) != 0; }

#endif

Variant best_of_cpu() {
    if (!has_dotprod()) return Variant::kNeon;
    return has_i8mm() && has_bf16() ? Variant::kNeonI8mm : Variant::kNeonDotprod;
}

#else

Variant best_of_cpu() { return Variant::kPortable; }

#endif

}  // namespace

Variant best_variant() { return best_of_cpu(); }

}  // namespace quire
