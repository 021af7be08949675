// Memory for a step's intermediate values, in huge pages where the system has them. A prompt's rows
// take megabytes, and each page of 4 KB costs a walk through the page tables.

#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace quire {

struct FreeFloats {
    void operator()(float* memory) const { std::free(memory); }
};

using HugeFloats = std::unique_ptr<float[], FreeFloats>;

// So many floats without values. Begins at a multiple of 2 MiB, or of 64 bytes where it is small.
// Throws std::bad_alloc.
inline HugeFloats huge_floats(size_t count) {
    constexpr size_t kLine = 64, kPage = size_t{2} << 20;
    const size_t bytes = count * sizeof(float), unit = bytes < kPage ? kLine : kPage;
    const size_t whole = (bytes / unit + 1) * unit;
    void* memory = std::aligned_alloc(unit, whole);
    if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
    if (unit == kPage) madvise(memory, whole, MADV_HUGEPAGE);
#endif
    return HugeFloats(static_cast<float*>(memory));
}

}  // namespace quire
