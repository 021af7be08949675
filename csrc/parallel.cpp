// The core's own threads. A step is some hundred phases of a few microseconds to milliseconds, so idle
// threads first look for the next phase, giving their core to whoever wants it, and sleep only later.
//
// A phase is over when its parts are done, not when all threads have come: one that the operating
// system keeps from running holds up nobody unless it has taken a part.
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
    void run(int64_t num_parts, int num_threads, void (*work)(void*, int64_t), void* context) {
        for (; num_workers_ < num_threads - 1; ++num_workers_) {
            std::thread([this, index = num_workers_] { serve(index); }).detach();
        }
        const uint32_t over = phase_of(ticket_.load(std::memory_order_relaxed));
        // Before anything that a late thread may read: it shall not take a part of what it sees.
        ticket_.store(ticket_of(over, kNoPart), std::memory_order_relaxed);
        work_.store(work, std::memory_order_release);
        context_.store(context, std::memory_order_release);
        num_parts_.store(num_parts, std::memory_order_release);
        helpers_.store(num_threads - 1, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const uint32_t phase = over + 1;
        ticket_.store(ticket_of(phase, 0));
        if (sleeping_.load() > 0) wake();
        take_parts(phase);
        for (int looks = 0; done_.load(std::memory_order_acquire) < num_parts; ++looks) {
            looks < kPatientLooks ? pause_briefly() : std::this_thread::yield();
        }
    }

   private:
    static constexpr uint32_t kNoPart = ~uint32_t{0};  // more than any phase has

    static uint32_t phase_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
    static uint64_t ticket_of(uint32_t phase, uint32_t part) {
        return uint64_t{phase} << 32 | part;
    }

    // Takes parts of this phase until none is left. What the phase is is read before a part is taken:
    // if it was the next phase's already, the ticket is no longer the one that was looked at.
    void take_parts(uint32_t phase) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (phase_of(ticket) == phase) {
            const auto part = static_cast<int64_t>(static_cast<uint32_t>(ticket));
            const auto work = work_.load(std::memory_order_acquire);
            void* context = context_.load(std::memory_order_acquire);
            if (part >= num_parts_.load(std::memory_order_acquire)) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                continue;
            }
            work(context, part);
            done_.fetch_add(1, std::memory_order_acq_rel);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void serve(int index) {
        uint32_t seen = 0;
        while (true) {
            seen = next_phase(seen);
            if (index < helpers_.load(std::memory_order_relaxed)) take_parts(seen);
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

    // The phase in the upper half, its next part in the lower one.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<void (*)(void*, int64_t)> work_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> num_parts_{0};
    std::atomic<int> helpers_{0};  // workers that may take part
    std::atomic<int> sleeping_{0};
    int num_workers_ = 0;
    std::mutex mutex_;
    std::condition_variable awake_;
};

std::atomic_flag in_use = ATOMIC_FLAG_INIT;
Pool* pool = nullptr;  // never deleted: its threads may outlive everything
pid_t owner = 0;

}  // namespace

void run_parts(int64_t num_parts, int num_threads, void (*work)(void*, int64_t), void* context) {
    const int threads = static_cast<int>(std::min<int64_t>(num_threads, num_parts));
    if (threads <= 1 || in_use.test_and_set(std::memory_order_acquire)) {
        for (int64_t part = 0; part < num_parts; ++part) work(context, part);
        return;
    }
    if (owner != getpid()) {  // the threads of a forked process stayed in its parent
        pool = new Pool;
        owner = getpid();
    }
    pool->run(num_parts, threads, work, context);
    in_use.clear(std::memory_order_release);
}

}  // namespace quire
