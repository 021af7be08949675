// Launches recorded steps of a GPU: one call from Python per step, three calls into the driver.
//
//     pinned slot    inbox | deltas | runs ...          written here, read by the `receive` kernel
//     stream         receive | graph of the step | event
//     mail           tokens of a step | flags           written by the graph's last kernel
//
// Mail is pinned memory too, [slots][words]. A slot has a step's tokens, one for each row, and a flag
// for each program of the kernel that writes them. A program writes its tokens, and then the step's
// ticket into its flag, by a release with the scope of the system. The host reads the flag by an
// acquire, so it sees the tokens. A slot of the mail is used again when its reader is done.
//
// The kernel's side is src/quire/ops/kernels (row_deltas.py, step_inputs.py).
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace quire {

// A step was launched and cannot be waited for, so it can neither be used nor repeated.
struct StepLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Where the words of a plan lie in a slot.
struct PlanLayout {
    int64_t header;    // words before the lists
    int64_t max_rows;  // of each list
    int64_t deltas_at;
    int64_t max_deltas;
};

// A compiled kernel with its arguments. The four arguments that a plan decides are found by their
// index: the slot's address, and the numbers of words, deltas and runs.
struct ReceiveKernel {
    void* function;
    int64_t num_threads;
    int64_t shared_bytes;
    int64_t max_programs;
    int64_t block;  // words or deltas of a program
    std::vector<uint64_t> arguments;
    int64_t slot, num_words, num_deltas, num_runs;
};

struct MailLayout {
    int32_t* words;
    int64_t num_slots;
    int64_t slot_words;
    int64_t flags_at;
};

// The lists of a plan, packed. deltas: [num_deltas][4]; of several to one place, the last one wins.
// The slot's runs are written already.
struct PackedPlan {
    const int32_t* rows;
    const int32_t* num_tokens;
    int64_t num_rows;
    const int32_t* sample_rows;
    const int64_t* sample_indices;  // of the scheduled rows whose logits they use
    int64_t num_samples;
    const int32_t* deltas;
    int64_t num_deltas;
    int64_t num_runs;
};

class StepLauncher {
   public:
    // The thread's CUDA context is the one of the stream. Throws std::runtime_error.
    StepLauncher(const std::string& driver, void* stream, ReceiveKernel receive, PlanLayout plan,
                 MailLayout mail);
    StepLauncher(const StepLauncher&) = delete;
    StepLauncher& operator=(const StepLauncher&) = delete;

    // Writes the plan into the slot, launches `receive` and the graph; returns the step's ticket.
    // One thread at a time. If it throws anything but StepLost, the step's counters do not move.
    int32_t launch(const PackedPlan& plan, int32_t* slot, int64_t mail_slot, void* graph);

    // Whether the tokens of the step are in the mail. num_flags: of the rows that are read. Any
    // thread may call it.
    bool is_done(int64_t mail_slot, int32_t ticket, int64_t num_flags) const;

    // Waits until is_done. Throws a std::runtime_error if the driver reports an error, if the work
    // has ended without the tokens, and after timeout_s.
    void wait(int64_t mail_slot, int32_t ticket, int64_t num_flags, double timeout_s) const;

   private:
    struct Destroy {
        const CudaDriver* driver;
        void operator()(void* event) const { driver->destroy_event(event); }
    };

    void enter_context() const;
    void check(const PackedPlan& plan, int64_t mail_slot) const;
    // Writes the plan into the slot; returns the number of deltas there, no two to one place.
    int64_t write(const PackedPlan& plan, int32_t* slot, int64_t mail_slot, int32_t ticket);
    int64_t merge(const int32_t* deltas, int64_t count, int32_t* out);

    const CudaDriver driver_;
    void* const stream_;
    ReceiveKernel receive_;
    std::vector<void*> parameters_;  // addresses of the kernel's arguments
    const PlanLayout plan_;
    const MailLayout mail_;
    void* context_ = nullptr;
    std::vector<std::unique_ptr<void, Destroy>> events_;  // by slot of the mail: the step's end
    std::vector<int32_t> seen_;  // hash table of a plan's deltas: index + 1, or 0
    int32_t ticket_ = 0;
};

}  // namespace quire
