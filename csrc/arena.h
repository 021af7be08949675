// Memory that a thread keeps from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace quire {

// A buffer of floats that begins at a 64-byte boundary and grows to the largest requested size.
class Arena {
   public:
    float* get(int64_t floats) {
        if (floats > size_) {
            size_ = floats + floats / 4;
            memory_.reset(new float[static_cast<size_t>(size_) + 16]);
        }
        const auto begin = reinterpret_cast<uintptr_t>(memory_.get());
        return reinterpret_cast<float*>((begin + 63) / 64 * 64);
    }

   private:
    std::unique_ptr<float[]> memory_;
    int64_t size_ = 0;
};

}  // namespace quire
