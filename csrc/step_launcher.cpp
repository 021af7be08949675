#include "step_launcher.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <sys/prctl.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

constexpr unsigned kNoTiming = 2;               // CU_EVENT_DISABLE_TIMING
constexpr microseconds kSpinning{50};           // most of a short step's wait
constexpr nanoseconds kShortestSleep{10'000};
constexpr nanoseconds kLongestSleep{1'000'000};
constexpr int kSleepShare = 50;                 // a sleep is this part of the time waited so far
constexpr std::chrono::milliseconds kQueryPeriod{50};  // between two calls of the driver

void pause_spinning() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// By default the system may end this thread's sleeps 50 us late.
void sleep_precisely() {
#if defined(__linux__)
    static thread_local const int once = prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
    (void)once;
#endif
}

int64_t parts_of(int64_t count, int64_t block) { return (count + block - 1) / block; }

}  // namespace

StepLauncher::StepLauncher(const std::string& driver, void* stream, ReceiveKernel receive,
                           PlanLayout plan, MailLayout mail)
    : driver_(driver), stream_(stream), receive_(std::move(receive)), plan_(plan), mail_(mail) {
    const auto size = static_cast<int64_t>(receive_.arguments.size());
    for (const int64_t index :
         {receive_.slot, receive_.num_words, receive_.num_deltas, receive_.num_runs}) {
        if (index < 0 || index >= size) throw std::runtime_error("the kernel lacks an argument");
    }
    for (uint64_t& argument : receive_.arguments) parameters_.push_back(&argument);
    driver_.check(driver_.get_context(&context_), "cuCtxGetCurrent");
    if (context_ == nullptr) throw std::runtime_error("this thread has no CUDA context");
    for (int64_t i = 0; i < mail_.num_slots; ++i) {
        void* event = nullptr;
        driver_.check(driver_.create_event(&event, kNoTiming), "cuEventCreate");
        events_.emplace_back(event, Destroy{&driver_});
    }
}

void StepLauncher::check(const PackedPlan& plan, int64_t mail_slot) const {
    if (plan.num_rows > plan_.max_rows || plan.num_samples > plan_.max_rows ||
        plan.num_deltas > plan_.max_deltas || mail_slot < 0 || mail_slot >= mail_.num_slots) {
        throw std::runtime_error("the plan does not fit its slot");
    }
}

// Each thread needs the context once; nothing else changes it in a process with one device.
void StepLauncher::enter_context() const {
    static thread_local void* entered = nullptr;
    if (entered == context_) return;
    driver_.check(driver_.set_context(context_), "cuCtxSetCurrent");
    entered = context_;
}

int64_t StepLauncher::merge(const int32_t* deltas, int64_t count, int32_t* out) {
    size_t size = 4;
    while (size < 2 * static_cast<size_t>(count)) size *= 2;
    seen_.assign(size, 0);
    int64_t merged = 0;
    for (int64_t i = count - 1; i >= 0; --i) {
        const int32_t* delta = deltas + 4 * i;  // kind, row, index, value
        uint64_t hash = static_cast<uint32_t>(delta[0]);
        for (const int part : {1, 2}) {
            hash = (hash ^ static_cast<uint32_t>(delta[part])) * 0x9e3779b97f4a7c15ULL;
        }
        size_t at = (hash >> 32) & (size - 1);
        while (seen_[at] != 0 && !std::equal(delta, delta + 3, deltas + 4 * (seen_[at] - 1))) {
            at = (at + 1) & (size - 1);
        }
        if (seen_[at] != 0) continue;  // a later delta has this place
        seen_[at] = static_cast<int32_t>(i + 1);
        std::copy_n(delta, 4, out + 4 * merged++);
    }
    return merged;
}

int64_t StepLauncher::write(const PackedPlan& plan, int32_t* slot, int64_t mail_slot,
                            int32_t ticket) {
    const int32_t header[] = {static_cast<int32_t>(plan.num_rows),
                              static_cast<int32_t>(plan.num_samples),
                              static_cast<int32_t>(mail_slot), ticket};
    std::memcpy(slot, header, sizeof(header));
    int32_t* list = slot + plan_.header;
    std::copy_n(plan.rows, plan.num_rows, list);
    list += plan_.max_rows;
    std::copy_n(plan.num_tokens, plan.num_rows, list);
    list += plan_.max_rows;
    for (int64_t i = 0; i < plan.num_samples; ++i) {
        list[2 * i] = plan.sample_rows[i];
        list[2 * i + 1] = static_cast<int32_t>(plan.sample_indices[i]);
    }
    return merge(plan.deltas, plan.num_deltas, slot + plan_.deltas_at);
}

int32_t StepLauncher::launch(const PackedPlan& plan, int32_t* slot, int64_t mail_slot,
                             void* graph) {
    check(plan, mail_slot);
    enter_context();
    const auto ticket = static_cast<int32_t>((static_cast<uint32_t>(ticket_) + 1) & 0x7fffffff);
    ticket_ = ticket == 0 ? 1 : ticket;  // 0 is no step's
    const int64_t num_deltas = write(plan, slot, mail_slot, ticket_);
    auto& arguments = receive_.arguments;
    arguments[receive_.slot] = reinterpret_cast<uint64_t>(slot);
    arguments[receive_.num_words] = static_cast<uint64_t>(plan_.deltas_at);
    arguments[receive_.num_deltas] = static_cast<uint64_t>(num_deltas);
    arguments[receive_.num_runs] = static_cast<uint64_t>(plan.num_runs);
    const int64_t units = std::max({parts_of(plan_.deltas_at, receive_.block),
                                    parts_of(num_deltas, receive_.block), plan.num_runs});
    const auto programs = static_cast<unsigned>(std::min(receive_.max_programs, units));
    driver_.check(driver_.launch_kernel(receive_.function, programs, 1, 1,
                                        static_cast<unsigned>(receive_.num_threads), 1, 1,
                                        static_cast<unsigned>(receive_.shared_bytes), stream_,
                                        parameters_.data(), nullptr),
                  "cuLaunchKernel");
    driver_.check(driver_.launch_graph(graph, stream_), "cuGraphLaunch");
    if (const int error = driver_.record_event(events_[mail_slot].get(), stream_); error != 0) {
        throw StepLost("a launched step cannot be waited for: " +
                       driver_.describe(error, "cuEventRecord"));
    }
    return ticket_;
}

bool StepLauncher::is_done(int64_t mail_slot, int32_t ticket, int64_t num_flags) const {
    const int32_t* flags = mail_.words + mail_slot * mail_.slot_words + mail_.flags_at;
    for (int64_t i = 0; i < num_flags; ++i) {
        if (__atomic_load_n(flags + i, __ATOMIC_ACQUIRE) != ticket) return false;
    }
    return true;
}

void StepLauncher::wait(int64_t mail_slot, int32_t ticket, int64_t num_flags,
                        double timeout_s) const {
    const auto began = Clock::now();
    Clock::duration queried{0};
    while (!is_done(mail_slot, ticket, num_flags)) {
        const auto waited = Clock::now() - began;
        if (waited < kSpinning) {
            pause_spinning();
            continue;
        }
        if (waited - queried >= kQueryPeriod) {
            queried = waited;
            enter_context();
            const int state = driver_.query_event(events_[mail_slot].get());
            if (is_done(mail_slot, ticket, num_flags)) return;
            if (state == 0) throw std::runtime_error("a step ended without its tokens");
            if (state != CudaDriver::kNotReady) driver_.check(state, "cuEventQuery");
        }
        if (std::chrono::duration<double>(waited).count() > timeout_s) {
            throw std::runtime_error("a step has not ended within " + std::to_string(timeout_s) +
                                     " s");
        }
        sleep_precisely();
        const auto share = duration_cast<nanoseconds>(waited) / kSleepShare;
        std::this_thread::sleep_for(std::clamp(share, kShortestSleep, kLongestSleep));
    }
}

}  // namespace quire
