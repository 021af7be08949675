// Code for several instruction sets in one object, chosen when it runs.
//
// A loop that the compiler vectorises by itself is marked QUIRE_VECTOR (parallel.h): the loader
// picks. Kernels for one instruction set have a source file each, whose functions carry that
// target. The variant picks them: the fastest one measured here, for each weight format
// (src/quire/ops/weights/kernel_choice.py). A variant is chosen by itself only if the tests have
// run it. x86 variants ran on CPUs (amx also in emulation, tests/ops/test_amx.py). ARM variants ran
// only in emulation: tests/ops/test_neon.py uses QEMU 7.2 in user mode (Linux), whose CPU
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

// The first and the last of the variants that are compiled: all, unless CMakeLists.txt says otherwise
// for x86-64.
#ifndef QUIRE_FIRST_VARIANT
#define QUIRE_FIRST_VARIANT 0
#define QUIRE_LAST_VARIANT 4
#endif

// From the least to the most that a CPU can have. kNeonI8mm: sdot, smmla and bfmmla.
enum class Variant : int {
    kPortable,
    // x86-64
    kAvx2 = 1,
    kAvx512,
    kAvx512Bf16,
    kAmx,
    // 64-bit ARM
    kNeon = 1,
    kNeonDotprod,
    kNeonI8mm,
};

// The last that was compiled and that this CPU runs: the one with the most features, which need not be
// the fastest. Less than QUIRE_FIRST_VARIANT: there is none.
Variant best_variant();

}  // namespace quire
