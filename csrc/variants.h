// Code for several instruction sets in one object, chosen when it runs.
//
// A loop that the compiler vectorises by itself is marked QUIRE_VECTOR (parallel.h): the loader picks.
// Kernels that are written for an instruction set have a source file each, whose functions carry that
// target, and are picked by variant. A variant is chosen by itself only if the tests have run it.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_X86_VARIANTS
#endif

namespace quire {

// From the least to the most that a CPU can have.
enum class Variant : int { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// The best that this CPU runs.
Variant best_variant();

}  // namespace quire
