// The core's own threads. A step is some hundred phases of a few microseconds to milliseconds. So
// idle threads first poll for the next phase, yielding their core to other threads, and sleep only
// later.
//
// A phase is over when all its work is done, even if some threads have not joined. A thread that
// the operating system has suspended delays a phase only if it has joined.
#include "parallel.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPatientLooks = 300;  // before the core is offered to others: some microseconds
constexpr auto kAwake = std::chrono::microseconds(200);  // how long an idle thread looks for work

class Pool {
   public:
    void run(int num_threads, void (*work)(void*, int), void* context) {
        for (; num_workers_ < num_threads - 1; ++num_workers_) {
            std::thread([this, index = num_workers_] { serve(index + 1); }).detach();
        }
        work_.store(work, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        num_threads_.store(num_threads, std::memory_order_relaxed);
        num_left_.store(0, std::memory_order_relaxed);
        const uint32_t phase = phase_of(ticket_.load(std::memory_order_relaxed)) + 1;
        ticket_.store(ticket_of(phase, 0));
        if (sleeping_.load() > 0) wake();
        work(context, 0);
        // Threads that have not joined are locked out, so the next phase may be written.
        const uint32_t entered = entered_of(ticket_.exchange(ticket_of(phase, kClosed)));
        for (int looks = 0; num_left_.load(std::memory_order_acquire) < entered; ++looks) {
            looks < kPatientLooks ? pause_briefly() : std::this_thread::yield();
        }
    }

   private:
    static constexpr uint32_t kClosed = ~uint32_t{0};  // instead of how many have come

    static uint32_t phase_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
    static uint32_t entered_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }
    static uint64_t ticket_of(uint32_t phase, uint32_t entered) {
        return uint64_t{phase} << 32 | entered;
    }

    // Returns whether this thread takes part in the phase. If num_threads_ already belongs to the
    // next phase, the ticket has changed, so the exchange fails.
    bool enter(uint32_t phase, int thread) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (phase_of(ticket) == phase && entered_of(ticket) != kClosed) {
            if (thread >= num_threads_.load(std::memory_order_acquire)) return false;
            if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                return true;
            }
        }
        return false;
    }

    void serve(int thread) {
        uint32_t seen = 0;
        while (true) {
            seen = next_phase(seen);
            if (!enter(seen, thread)) continue;
            const auto work = work_.load(std::memory_order_relaxed);
            work(context_.load(std::memory_order_relaxed), thread);
            num_left_.fetch_add(1, std::memory_order_acq_rel);
        }
    }

    // Waits for a phase other than the one seen last.
    uint32_t next_phase(uint32_t seen) {
        const auto phase = [&] { return phase_of(ticket_.load()); };
        for (int looks = 0; looks < kPatientLooks; ++looks) {
            if (phase() != seen) return phase();
            pause_briefly();
        }
        for (const auto until = Clock::now() + kAwake; Clock::now() < until;) {
            if (phase() != seen) return phase();
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);
        awake_.wait(lock, [&] { return phase() != seen; });
        sleeping_.fetch_sub(1);
        return phase();
    }

    void wake() {
        { const std::lock_guard<std::mutex> lock(mutex_); }  // between their look and their sleep
        awake_.notify_all();
    }

    // The phase in the upper half, how many workers have come in the lower one.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> num_left_{0};  // workers that came and are done
    alignas(64) std::atomic<void (*)(void*, int)> work_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> num_threads_{0};  // that may take part
    std::atomic<int> sleeping_{0};
    int num_workers_ = 0;
    std::mutex mutex_;
    std::condition_variable awake_;
};

std::atomic_flag in_use = ATOMIC_FLAG_INIT;
Pool* pool = nullptr;  // never deleted: its threads may outlive everything
pid_t owner = 0;

}  // namespace

void run_threads(int num_threads, void (*work)(void*, int), void* context) {
    if (num_threads <= 1 || in_use.test_and_set(std::memory_order_acquire)) return work(context, 0);
    if (owner != getpid()) {  // the threads of a forked process stayed in its parent
        pool = new Pool;
        owner = getpid();
    }
    pool->run(num_threads, work, context);
    in_use.clear(std::memory_order_release);
}

namespace {

// A word that two threads write in turns.
struct Exchange {
    static constexpr int kTimes = 20'000;
    static constexpr std::chrono::seconds kMost{1};

    alignas(64) std::atomic<int> turn{0};  // odd: the other thread's; below 0: over
    double seconds = 0;

    void answer() {
        for (int seen = turn.load(); seen >= 0; seen = turn.load()) {
            if (seen % 2 == 1) turn.compare_exchange_strong(seen, seen + 1);
        }
    }

    // Ends after a second also where the two have one core between them.
    void signal() {
        const auto until = Clock::now() + kMost;
        turn.store(1);
        while (turn.load() == 1 && Clock::now() < until) {}
        const bool has_come = turn.load() != 1;
        const auto began = Clock::now();
        int times = 0;
        for (; has_come && times < kTimes && (times % 64 > 0 || Clock::now() < until); ++times) {
            turn.store(2 * times + 3);
            while (turn.load() == 2 * times + 3) {}
        }
        const std::chrono::duration<double> took = Clock::now() - began;
        turn.store(-1);
        if (times > 0) seconds = took.count() / (2.0 * times);
    }
};

}  // namespace

double seconds_between_threads() {
    Exchange exchange;
    const auto take_turns = [](void* context, int thread) {
        auto& own = *static_cast<Exchange*>(context);
        thread == 0 ? own.signal() : own.answer();
    };
    run_threads(2, take_turns, &exchange);
    return exchange.seconds;
}

}  // namespace quire
