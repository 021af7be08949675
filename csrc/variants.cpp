#include "variants.h"

#include <algorithm>
#include <cstdint>

#ifdef QUIRE_X86_VARIANTS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

#ifdef QUIRE_EMULATED_AMX

bool may_use_amx() { return true; }

#else

// The parts of the processor's state that Linux saves and restores.
uint64_t saved_states() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

// Returns whether the CPU multiplies tiles of bfloat16 and of bytes, and Linux permits it to this
// process. Linux kills a process that uses tiles without that permission. All threads share the
// permission.
bool may_use_amx() {
    constexpr unsigned kSavesStates = 1u << 27, kFeatures = 1u << 22 | 1u << 24 | 1u << 25;
    constexpr uint64_t kTileStates = 1u << 17 | 1u << 18;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of Linux 5.16; older headers lack them
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSavesStates) == 0) return false;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kFeatures) != kFeatures) return false;
    if ((saved_states() & kTileStates) != kTileStates) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

Variant best_of_cpu() {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) {
        return may_use_amx() ? Variant::kAmx : Variant::kAvx512Bf16;
    }
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

Variant best_variant() {
    static const Variant best = std::min(best_of_cpu(), static_cast<Variant>(QUIRE_LAST_VARIANT));
    return best;
}

}  // namespace quire
