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

VariantSet variants_of_cpu() {
    __builtin_cpu_init();
    X86Features features{};
    features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
    features.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    features.avx512_vnni = __builtin_cpu_supports("avx512vnni");
    features.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
#if defined(QUIRE_EMULATED_AVX_VNNI)
    features.avx_vnni = true;
#elif defined(QUIRE_EVEX_AVX_VNNI)
    features.avx_vnni = features.avx512 && features.avx512_vnni;
#else
    features.avx_vnni = __builtin_cpu_supports("avxvnni");
#endif
    features.amx = may_use_amx();
    return variants_with(features);
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

VariantSet variants_of_cpu() {
    VariantSet found = set_of(Variant::kPortable) | set_of(Variant::kNeon);
    if (!has_dotprod()) return found;
    found |= set_of(Variant::kNeonDotprod);
    return has_i8mm() && has_bf16() ? found | set_of(Variant::kNeonI8mm) : found;
}

#else

VariantSet variants_of_cpu() { return set_of(Variant::kPortable); }

#endif

}  // namespace

VariantSet variants_with(const X86Features& features) {
    VariantSet found = set_of(Variant::kPortable);
    if (!features.avx2) return found;
    found |= set_of(Variant::kAvx2);
    if (features.avx_vnni) found |= set_of(Variant::kAvxVnni);
    if (!features.avx512 || !features.avx512_vnni) return found;
    found |= set_of(Variant::kAvx512);
    if (!features.avx512_bf16) return found;
    found |= set_of(Variant::kAvx512Bf16);
    return features.amx ? found | set_of(Variant::kAmx) : found;
}

VariantSet running_variants() {
    static const VariantSet running = variants_of_cpu() & QUIRE_COMPILED_VARIANTS;
    return running;
}

}  // namespace quire
