// Work on indices that is fastest in order, such as panels of a weight, each of which prefetches
// the next. Every thread has a stretch of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace quire {

inline int64_t num_stretches(int64_t count, int num_threads) {
    return std::max<int64_t>(1, std::min<int64_t>(num_threads, count));
}

// Returns the first index of a stretch of [0, count).
inline int64_t begin_of_stretch(int64_t stretch, int64_t count, int64_t num_stretches) {
    return stretch * count / num_stretches;
}

// The stretch of [0, count) that ends here, or -1.
inline int64_t stretch_ending_at(int64_t end, int64_t count, int64_t num_stretches) {
    const int64_t next = (end * num_stretches + count - 1) / count;
    return begin_of_stretch(next, count, num_stretches) == end ? next - 1 : -1;
}

// [0, count) in stretches of nearly equal length. A thread that has finished its own stretch takes
// the last half of the longest remaining one. So threads end together, however fast each of them
// is. granule: indices from one of its multiples to the next are taken together, except at the ends
// of stretches.
class Stretches {
   public:
    Stretches(int64_t count, int64_t num_stretches, int64_t granule = 1)
        : left_(static_cast<size_t>(num_stretches)), granule_(granule) {
        for (int64_t i = 0; i < num_stretches; ++i) {
            left_[static_cast<size_t>(i)].range =
                packed(begin_of_stretch(i, count, num_stretches),
                       begin_of_stretch(i + 1, count, num_stretches));
        }
    }

    // Calls work(begin, end) for parts of stretch `own`, then of other stretches, until none is
    // left to share.
    template <class Work>
    void run(int64_t own, Work work) {
        Left& left = left_[static_cast<size_t>(own)];
        std::atomic<uint64_t>& range = left.range;
        left.is_begun.store(true, std::memory_order_relaxed);
        do {
            for (uint64_t seen = range.load(); length(seen) > 0;) {
                const int64_t end = end_of_piece(seen);
                if (!range.compare_exchange_weak(seen, packed(end, last(seen)))) continue;
                work(first(seen), end);
                seen = range.load();
            }
        } while (take_half(range));
    }

   private:
    struct alignas(64) Left {
        std::atomic<uint64_t> range;
        std::atomic<bool> is_begun{false};
    };
    static constexpr int64_t kPieces = 8;  // a thread takes an eighth of its own at a time

    static uint64_t packed(int64_t begin, int64_t end) {
        return static_cast<uint64_t>(begin) << 32 | static_cast<uint64_t>(end);
    }
    static int64_t first(uint64_t range) { return static_cast<int64_t>(range >> 32); }
    static int64_t last(uint64_t range) { return static_cast<int64_t>(range & 0xFFFFFFFFu); }
    static int64_t length(uint64_t range) { return last(range) - first(range); }

    int64_t end_of_piece(uint64_t range) const {
        const int64_t end = first(range) + std::max<int64_t>(1, length(range) / kPieces);
        return std::min(last(range), (end + granule_ - 1) / granule_ * granule_);
    }

    // Moves the last half of the longest stretch to `own`, which is empty, so only this thread
    // writes to it. If no thread has begun that stretch, it moves all of it. Ranges never repeat,
    // so an unchanged range was not touched.
    bool take_half(std::atomic<uint64_t>& own) {
        while (true) {
            Left* longest = nullptr;
            uint64_t seen = 0;
            for (Left& each : left_) {
                const uint64_t range = each.range.load();
                if (length(range) > length(seen)) longest = &each, seen = range;
            }
            if (longest == nullptr) return false;
            const bool is_begun = longest->is_begun.load(std::memory_order_relaxed);
            const int64_t middle = first(seen) + (is_begun ? length(seen) / 2 : 0);
            if (!longest->range.compare_exchange_strong(seen, packed(first(seen), middle))) continue;
            own.store(packed(middle, last(seen)));
            return true;
        }
    }

    std::vector<Left> left_;
    const int64_t granule_;
};

}  // namespace quire
