// Ranks that are processes of one machine, and what they exchange through memory that all have mapped.
//
//     header | a line for each rank | slots [rank][2][slot_bytes]
//
// Tensors go in pieces that fit into a slot. A rank puts its piece into its slot and says so by a
// counter in its line. Then it waits for the others' counters, and reads their slots. Each rank
// uses two slots in turn. A rank that has written a piece has read all earlier pieces, so a slot's
// piece before last is no longer needed.
//
// Sums are taken in the order of ranks, so all ranks get the same bits. Sums of 16-bit numbers are
// computed in float32 and rounded once.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace quire {

enum class Number : int { kFloat32, kBfloat16, kFloat16, kFloat64, kInt32, kInt64 };

// Another rank has ended, has aborted, or did not arrive in time. From then on all exchanges of all
// ranks throw.
struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class SharedGroup {
   public:
    static constexpr int kMostRanks = 64;

    // Joins the group. Every rank calls it with the same sizes and the path of one file, which is
    // created if absent. Otherwise it throws a std::runtime_error that says what is wrong.
    // timeout_s: how long a rank waits for another. When a process ends, for whatever reason, its
    // rank is lost.
    SharedGroup(const std::string& path, int rank, int size, int64_t slot_bytes, double timeout_s);
    ~SharedGroup();
    SharedGroup(const SharedGroup&) = delete;
    SharedGroup& operator=(const SharedGroup&) = delete;

    // x[count] = its sum over all ranks.
    void all_reduce(void* x, int64_t count, Number number, int num_threads);
    // out[size][bytes] = what all ranks have.
    void all_gather(void* out, const void* x, int64_t bytes, int num_threads);
    // out[count] = the sum of part `rank` of all ranks' x[size][count].
    void reduce_scatter(void* out, const void* x, int64_t count, Number number, int num_threads);
    // out[g][bytes] = part `rank` of rank g's x[size][bytes].
    void all_to_all(void* out, const void* x, int64_t bytes, int num_threads);

    // Aborts: the exchanges of all ranks throw, also those in progress. Any thread may call it.
    void abort() { lose(kGaveUp, rank_); }

    // The time that exchanges have taken, with waiting.
    double seconds() const { return seconds_; }
    // The number of exchanges that this rank has begun. Any thread may call it.
    uint32_t num_exchanges() const;

   private:
    enum Reason : uint32_t { kGaveUp, kEnded, kLate };
    struct Header;
    struct Line;
    class Timed;

    Header* header() const;
    Line* line(int rank) const;
    uint8_t* slot(int rank) const;  // of the piece that is exchanged
    void join();
    void meet();
    void wait_for(int rank, uint32_t count);
    bool has_ended(int rank) const;
    void lose(Reason reason, int rank);
    void check() const;

    int rank_, size_, file_ = -1;
    int64_t slot_bytes_, bytes_;
    double timeout_s_;
    uint8_t* memory_ = nullptr;
    uint32_t count_ = 0;  // how often this rank has met the others
    uint32_t piece_ = 0;
    double seconds_ = 0.0;
};

}  // namespace quire
