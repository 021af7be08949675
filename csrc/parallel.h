// Work on several threads, and code for several instruction sets in one object.
#pragma once

#include <algorithm>
#include <atomic>
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

// GOMP_parallel of the OpenMP library that PyTorch has loaded, or null. With it our work runs on the
// threads that PyTorch's own operations use: a second pool would wait for cores on which theirs
// spin. Without it threads are started for each call.
using ParallelRegion = void (*)(void (*function)(void*), void* data, unsigned num_threads,
                                unsigned flags);
extern ParallelRegion parallel_region;

// Calls work(part) for every part of [0, num_parts), each once, on at most num_threads threads of
// which this is one. A thread that is done with a part takes the next.
template <class Work>
void parallel_parts(int64_t num_parts, int num_threads, Work work) {
    struct Shared {
        Work& work;
        int64_t num_parts;
        std::atomic<int64_t> next{0};
    } shared{work, num_parts};
    const auto run = [](void* data) {
        Shared& mine = *static_cast<Shared*>(data);
        for (int64_t part; (part = mine.next.fetch_add(1)) < mine.num_parts;) mine.work(part);
    };
    const auto threads = static_cast<unsigned>(
        std::max<int64_t>(1, std::min<int64_t>(num_threads, num_parts)));
    if (threads == 1) return run(&shared);
    if (parallel_region != nullptr) return parallel_region(run, &shared, threads, 0);
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(run, &shared);
    run(&shared);
    for (std::thread& thread : others) thread.join();
}

// Calls work(begin, end) for num_threads contiguous parts of [0, count).
template <class Work>
void parallel_for(int64_t count, int num_threads, Work work) {
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, count));
    parallel_parts(parts, num_threads, [&](int64_t part) {
        work(part * count / parts, (part + 1) * count / parts);
    });
}

}  // namespace quire
