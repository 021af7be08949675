// Reads the rows of a weight that is packed, a panel's at a time.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>

#include "linear.h"

namespace quire {

// Why packing failed, the first thing that any thread found.
class PackError {
   public:
    void set(int code) {
        int none = 0;
        code_.compare_exchange_strong(none, code);
    }
    int code() const { return code_; }

   private:
    std::atomic<int> code_{0};
};

// One thread's. Rows of a file come into memory that is used again for each panel, and stays in the
// cache: nothing of the file is mapped, so that there are no page faults.
class RowReader {
   public:
    // error: set where the file cannot be read; then rows hold anything.
    RowReader(const PackedWeight& weight, const WeightRows& from, PackError& error)
        : from_(from),
          error_(error),
          panel_(linear_kernels(weight.variant).panel),
          outputs_(weight.outputs),
          row_bytes_(weight.inputs * (from.element == Element::kFloat32 ? 4 : 2)) {
        if (from.memory == nullptr) read_.reset(new uint8_t[static_cast<size_t>(panel_ * row_bytes_)]);
    }

    int64_t row_bytes() const { return row_bytes_; }

    // Row n; the others of its panel follow it until the next call.
    const uint8_t* row(int64_t n) {
        if (from_.memory != nullptr) return from_.memory + n * row_bytes_;
        const int64_t first = n / panel_ * panel_;
        if (first != first_) read(first);
        return read_.get() + (n - first) * row_bytes_;
    }

   private:
    void read(int64_t first) {
        first_ = first;
        int64_t done = 0, num_bytes = std::min(panel_, outputs_ - first) * row_bytes_;
        while (done < num_bytes && error_.code() == 0) {
            const ssize_t count =
                pread(from_.file, read_.get() + done, static_cast<size_t>(num_bytes - done),
                      from_.offset + first * row_bytes_ + done);
            if (count > 0) {
                done += count;
            } else if (count == 0 || errno != EINTR) {
                error_.set(count == 0 ? kFileEnds : errno);
            }
        }
    }

    const WeightRows& from_;
    PackError& error_;
    const int64_t panel_, outputs_, row_bytes_;
    std::unique_ptr<uint8_t[]> read_;
    int64_t first_ = -1;  // of the rows that were read
};

}  // namespace quire
