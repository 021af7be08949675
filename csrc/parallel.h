// Work on several threads, and code for several instruction sets in one object.
#pragma once

#include <algorithm>
#include <cstdint>

#include "stretches.h"
#include "variants.h"

// The function is compiled for each of these and the best one is chosen when the object is loaded.
// x86-64 with an ELF loader only; elsewhere the baseline is what there is. A core that was built for
// a CPU with AVX2 and no AVX-512 has nothing above AVX2.
#ifndef QUIRE_X86_VARIANTS
#define QUIRE_VECTOR
#elif QUIRE_HAS_VARIANT(1) && !QUIRE_HAS_VARIANT(3)
#define QUIRE_VECTOR __attribute__((target_clones("avx2", "default")))
#else
#define QUIRE_VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

namespace quire {

// Hints to the processor that this thread is polling.
inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls work(context, 0) on this thread, and work(context, i) on each thread i < num_threads that
// joins before the call on this thread ends. So each call must do all work that no other call has
// begun. Within such work, or while another thread has the pool, only this thread works.
void run_threads(int num_threads, void (*work)(void*, int), void* context);

// Returns the seconds until a thread sees another thread's write: the mean of many round trips, or
// 0 if no other thread joined.
double seconds_between_threads();

// Calls work(begin, end) for parts of [0, count) on at most num_threads threads, of which this is one.
// Stretch i is thread i's, so that what it wrote in one phase is in its cache in the next.
template <class Work>
void parallel_stretches(int64_t count, int num_threads, Work work, int64_t granule = 1) {
    const int64_t num = num_stretches(count, num_threads);
    if (num == 1) {
        if (count > 0) work(int64_t{0}, count);
        return;
    }
    struct Phase {
        Stretches stretches;
        Work& work;
    } phase{Stretches(count, num, granule), work};
    run_threads(
        static_cast<int>(num),
        [](void* context, int thread) {
            auto* own = static_cast<Phase*>(context);
            own->stretches.run(thread, own->work);
        },
        &phase);
}

// Calls work(part) for every part of [0, num_parts).
template <class Work>
void parallel_parts(int64_t num_parts, int num_threads, Work work) {
    parallel_stretches(num_parts, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) work(part);
    });
}

// Calls work(begin, end) for contiguous parts of [0, count), parts_per_thread for each thread. With
// several parts, a suspended thread delays the others less.
template <class Work>
void parallel_for(int64_t count, int num_threads, Work work, int64_t parts_per_thread = 1) {
    const int64_t parts = std::max<int64_t>(1, std::min(parts_per_thread * num_threads, count));
    parallel_parts(parts, num_threads, [&](int64_t part) {
        work(part * count / parts, (part + 1) * count / parts);
    });
}

}  // namespace quire
