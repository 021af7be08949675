// Writes and reads one output of a panel of a weight that has groups.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"
#include "linear_codes.h"
#include "parallel.h"

namespace quire {

class PanelLane {
   public:
    explicit PanelLane(const PackedWeight& weight)
        : layout_(weight),
          values_(weight.parts().values),
          group_(weight.group),
          words_(static_cast<size_t>(weight.group * bits_of(values_) / 32)) {}

    const PanelLayout& layout() const { return layout_; }

    // One factor, a place of `bytes` bytes in each lane from `offset` on.
    void put(uint8_t* panel, int64_t offset, int64_t lane, const void* value, size_t bytes) const {
        std::memcpy(panel + offset + lane * static_cast<int64_t>(bytes), value, bytes);
    }
    template <class T>
    T get(const uint8_t* panel, int64_t offset, int64_t lane) const {
        T value;
        std::memcpy(&value, panel + offset + lane * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }

    // The group's codes: integers as they are stored, or e4m3.
    void put_codes(uint8_t* panel, int64_t g, int64_t lane, const uint8_t* codes) {
        uint8_t* begin = panel + layout_.values(g);
        if (values_ == Values::kFloat8) {
            for (int64_t k = 0; k < group_; k += 2) {
                std::memcpy(begin + (k / 2 * layout_.panel + lane) * 2, codes + k, 2);
            }
            return;
        }
        encode(words_.data(), values_, codes, group_);
        for (size_t w = 0; w < words_.size(); ++w) {
            std::memcpy(begin + place(static_cast<int64_t>(w), lane), &words_[w], 4);
        }
    }
    void get_codes(uint8_t* codes, const uint8_t* panel, int64_t g, int64_t lane) {
        const uint8_t* begin = panel + layout_.values(g);
        if (values_ == Values::kFloat8) {
            for (int64_t k = 0; k < group_; k += 2) {
                std::memcpy(codes + k, begin + (k / 2 * layout_.panel + lane) * 2, 2);
            }
            return;
        }
        for (size_t w = 0; w < words_.size(); ++w) {
            std::memcpy(&words_[w], begin + place(static_cast<int64_t>(w), lane), 4);
        }
        decode(codes, values_, words_.data(), group_);
    }

   private:
    // Returns the byte of word w of a lane in its group. A vector's words of a step are contiguous.
    int64_t place(int64_t w, int64_t lane) const {
        const int64_t together = words_of_step(values_), lanes = layout_.panel / kPanelVectors;
        const int64_t step = w / together, vector = lane / lanes;
        const int64_t before = (step * kPanelVectors + vector) * together + w % together;
        return (before * lanes + lane % lanes) * 4;
    }

    PanelLayout layout_;
    Values values_;
    int64_t group_;
    std::vector<uint32_t> words_;
};

// Calls pack_row(packer, panel, lane, n) for each output n. Each thread has its own packer, from
// make(). n is -1 for the padding of the last panel, which is all zero before.
template <class Make, class PackRow>
void pack_panels(uint8_t* data, const PackedWeight& weight, int num_threads, Make make,
                 PackRow pack_row) {
    const int64_t panel = linear_kernels(weight.variant).panel, bytes = packed_panel_bytes(weight);
    const int64_t panels = (weight.outputs + panel - 1) / panel;
    const auto pack_part = [&](int64_t begin, int64_t end) {
        auto packer = make();
        for (int64_t p = begin; p < end; ++p) {
            uint8_t* to = data + p * bytes;
            std::memset(to, 0, static_cast<size_t>(bytes));
            for (int64_t lane = 0; lane < panel; ++lane) {
                const int64_t n = p * panel + lane;
                pack_row(packer, to, lane, n < weight.outputs ? n : -1);
            }
        }
    };
    parallel_for(panels, num_threads, pack_part, kPartsOfWeight);
}

}  // namespace quire
