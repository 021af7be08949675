// Checks the thread pool, without Python: many short phases with different numbers of parts, on more
// threads than there are cores, so that threads come late to phases that are over. Every other phase
// is one of stretches, whose threads take from each other. Then one of them is held up, and the
// others do what is left of its stretch. At last all threads come, to the same stretches each time.
//
// Prints a line. The exit status is 1 if a part was not done exactly once, or with another phase's
// work, if nobody did the held up thread's, if stretches changed hands, or if one's end is not found.
// Argument: the number of phases.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

constexpr int64_t kMaxParts = 64;

struct Phase {
    int64_t number, num_parts;
    std::vector<std::atomic<int64_t>>* counts;  // of all phases, for each part
    std::atomic<int64_t>* wrong;
};

// Who takes the first part of all holds it until all others are done. Returns whether they were, in a
// minute.
bool others_do_what_is_left() {
    std::atomic<int64_t> done{0};
    std::atomic<bool> in_time{true};
    quire::parallel_stretches(kMaxParts, 2, [&](int64_t begin, int64_t end) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
        while (begin == 0 && done.load() < kMaxParts - end && in_time.load()) {
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() > until) in_time.store(false);
        }
        done.fetch_add(end - begin);
    });
    return in_time.load() && done.load() == kMaxParts;
}

// In each of some phases nobody goes on before all threads have come. Returns whether each had the same
// stretch every time, and all came within a minute.
bool stretches_stay_with_their_threads() {
    constexpr int kThreads = 4;
    std::vector<std::thread::id> owners(kThreads);
    std::atomic<bool> is_right{true};
    for (int phase = 0; phase < 100; ++phase) {
        std::atomic<int> come{0};
        quire::parallel_stretches(kThreads, kThreads, [&](int64_t begin, int64_t end) {
            if (end != begin + 1) is_right.store(false);
            std::thread::id& owner = owners[static_cast<size_t>(begin)];
            if (phase == 0) owner = std::this_thread::get_id();
            if (owner != std::this_thread::get_id()) is_right.store(false);
            const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
            for (come.fetch_add(1); come.load() < kThreads && is_right.load();) {
                std::this_thread::yield();
                if (std::chrono::steady_clock::now() > until) is_right.store(false);
            }
        });
    }
    return is_right.load();
}

// Whether exactly the ends of stretches are found to be such, and of the right ones.
bool ends_of_stretches_are_found() {
    for (int64_t count = 1; count <= 200; ++count) {
        for (int64_t num = 1; num <= std::min<int64_t>(count, 17); ++num) {
            std::vector<int64_t> expected(static_cast<size_t>(count + 1), -1);
            for (int64_t i = 0; i < num; ++i) expected[static_cast<size_t>((i + 1) * count / num)] = i;
            for (int64_t end = 0; end <= count; ++end) {
                const int64_t found = quire::stretch_ending_at(end, count, num);
                if (found != expected[static_cast<size_t>(end)]) return false;
            }
        }
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t num_phases = argc > 1 ? std::atoll(argv[1]) : 1000000;
    std::vector<std::atomic<int64_t>> counts(kMaxParts);
    std::vector<int64_t> expected(kMaxParts);
    std::atomic<int64_t> wrong{0}, current{-1};
    uint64_t state = 1;
    for (int64_t number = 0; number < num_phases; ++number) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const int64_t num_parts = 2 + static_cast<int64_t>(state >> 33) % (kMaxParts - 1);
        const int num_threads = 2 + static_cast<int>(state >> 60) % 7;
        Phase phase{number, num_parts, &counts, &wrong};
        current.store(number);
        const auto work = [&phase, &current](int64_t part) {
            const bool is_right = phase.number == current.load() && part < phase.num_parts;
            if (!is_right) phase.wrong->fetch_add(1);
            (*phase.counts)[static_cast<size_t>(part % kMaxParts)].fetch_add(1);
        };
        if (number % 2 == 0) {
            quire::parallel_parts(num_parts, num_threads, work);
        } else {
            const auto all = [&work](int64_t begin, int64_t end) {
                for (int64_t part = begin; part < end; ++part) work(part);
            };
            const int64_t granule = 1 + static_cast<int64_t>(state >> 40) % 6;
            quire::parallel_stretches(num_parts, num_threads, all, granule);
        }
        for (int64_t part = 0; part < num_parts; ++part) expected[static_cast<size_t>(part)] += 1;
        for (size_t part = 0; part < kMaxParts; ++part) {
            if (counts[part].load() != expected[part]) wrong.fetch_add(1);
        }
        if (wrong.load() > 0) break;
    }
    if (!others_do_what_is_left()) wrong.fetch_add(1);
    if (!stretches_stay_with_their_threads()) wrong.fetch_add(1);
    if (!ends_of_stretches_are_found()) wrong.fetch_add(1);
    std::printf("parallel: %lld phases, %lld wrong\n", static_cast<long long>(num_phases),
                static_cast<long long>(wrong.load()));
    return wrong.load() > 0;
}
