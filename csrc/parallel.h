// Work on several threads, and code for several instruction sets in one object.
#pragma once

#include <algorithm>
#include <cstdint>

// The function is compiled for each of these and the best one is chosen when the object is loaded.
// x86-64 with an ELF loader only; elsewhere the baseline is what there is.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define QUIRE_VECTOR
#endif

namespace quire {

// Tells the processor that this thread only looks whether something has come.
inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls work(context, part) for every part of [0, num_parts), each once, on at most num_threads
// threads of which this is one. A thread that is done with a part takes the next. Called from within
// such work, or while another thread has the pool, it does all parts itself.
void run_parts(int64_t num_parts, int num_threads, void (*work)(void*, int64_t), void* context);

// The same for anything that can be called with a part.
template <class Work>
void parallel_parts(int64_t num_parts, int num_threads, Work work) {
    run_parts(
        num_parts, num_threads,
        [](void* context, int64_t part) { (*static_cast<Work*>(context))(part); }, &work);
}

// Calls work(begin, end) for contiguous parts of [0, count), so many for each thread: with several, one
// that the operating system keeps from running holds up less.
template <class Work>
void parallel_for(int64_t count, int num_threads, Work work, int64_t parts_per_thread = 1) {
    const int64_t parts = std::max<int64_t>(1, std::min(parts_per_thread * num_threads, count));
    parallel_parts(parts, num_threads, [&](int64_t part) {
        work(part * count / parts, (part + 1) * count / parts);
    });
}

}  // namespace quire
