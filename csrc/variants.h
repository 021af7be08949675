// Code for several instruction sets in one object, chosen when it runs.
//
// A loop that the compiler vectorises by itself is marked QUIRE_VECTOR (parallel.h): the loader
// picks. Kernels for one instruction set have a source file each, whose functions carry that
// target. The variant picks them: the fastest one measured here, for each weight format
// (src/quire/ops/weights/kernel_choice.py). A variant is chosen by itself only if the tests have
// run it. x86 variants ran on CPUs, amx also in emulation (tests/ops/test_amx.py). avx_vnni ran in
// emulation and, as AVX-512 encodes its instruction, on CPUs (tests/ops/test_avx_vnni.py). ARM
// variants ran only in emulation: tests/ops/test_neon.py uses QEMU 7.2 in user mode (Linux), whose CPU
//
//   cortex-a53     chooses neon
//   neoverse-n1    chooses neon_dotprod
//   max            chooses neon_i8mm
//
// The look-up of features on macOS has been compiled only.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_X86_VARIANTS
#endif

#if defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__)) && defined(__GNUC__)
#define QUIRE_ARM_VARIANTS
#endif

namespace quire {

// A bit for each variant that is compiled: all, unless CMakeLists.txt says otherwise for x86-64.
#ifndef QUIRE_COMPILED_VARIANTS
#define QUIRE_COMPILED_VARIANTS 0x3F
#endif
#define QUIRE_HAS_VARIANT(number) ((QUIRE_COMPILED_VARIANTS >> (number) & 1) != 0)

// In the order of their speed, as a rule. kAvxVnni: vpdpbusd on 256 bits, which no AVX-512 variant
// needs. kNeonI8mm: sdot, smmla and bfmmla.
enum class Variant : int {
    kPortable,
    // x86-64
    kAvx2 = 1,
    kAvxVnni,
    kAvx512,
    kAvx512Bf16,
    kAmx,
    // 64-bit ARM
    kNeon = 1,
    kNeonDotprod,
    kNeonI8mm,
};

// Variants, a bit for each number.
using VariantSet = unsigned;

constexpr VariantSet set_of(Variant variant) { return 1u << static_cast<int>(variant); }

// Returns the number of the last variant of a set that is not empty.
constexpr int last_of(VariantSet variants) {
    int last = -1;
    for (; variants != 0; variants >>= 1) ++last;
    return last;
}

// The features that x86-64 variants need, each a group of the CPU's own.
// avx2: with FMA and F16C. avx512: F, BW, VL and DQ. amx: tiles of bfloat16 and of bytes, which
// the operating system permits.
struct X86Features {
    bool avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx;
};

// Returns the variants that an x86-64 CPU with these features runs.
VariantSet variants_with(const X86Features& features);

// Returns the compiled variants that this CPU runs. The last one has the most features, but need not
// be the fastest. A core that was built for another CPU may have none.
VariantSet running_variants();

}  // namespace quire
