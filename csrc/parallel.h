// Work on several threads, and code for several instruction sets in one object.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// The function is compiled for each of these and the best one is chosen when the object is loaded.
// x86-64 with an ELF loader only; elsewhere the baseline is what there is.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define QUIRE_VECTOR
#endif

namespace quire {

// Calls work(begin, end) for num_threads contiguous parts of [0, count), one of them on this thread.
template <class Work>
void parallel_for(int64_t count, int num_threads, Work work) {
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, count));
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(parts - 1));
    for (int64_t part = 1; part < parts; ++part) {
        threads.emplace_back(work, part * count / parts, (part + 1) * count / parts);
    }
    work(int64_t{0}, count / parts);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace quire
