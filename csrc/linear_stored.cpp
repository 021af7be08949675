// Packing of numbers that a checkpoint stores quantised, which stay what they are.
#include <algorithm>
#include <vector>

#include "elements.h"
#include "linear.h"
#include "linear_panel.h"

namespace quire {
namespace {

class StoredPacker {
   public:
    StoredPacker(const PackedWeight& weight, const StoredArrays& from)
        : weight_(weight),
          parts_(weight.parts()),
          from_(from),
          bias_(stored_bias(weight)),
          lane_(weight),
          codes_(static_cast<size_t>(weight.group)) {}

    void pack(uint8_t* panel, int64_t lane, int64_t n) {
        const PanelLayout& layout = lane_.layout();
        for (int64_t g = 0; g < weight_.groups(); ++g) {
            const int64_t at = n * weight_.groups() + g, begin = g * weight_.group;
            put_scale(panel, layout.scales(g), lane, at);
            if (parts_.offsets == Offsets::kZeros) {
                put_float(panel, layout.offsets(g), lane, from_.zeros[at],
                          parts_.scales == Scales::kFloat32 ? Scales::kFloat32 : Scales::kBfloat16);
            }
            read_codes(n, begin, std::min(weight_.group, weight_.inputs - begin));
            lane_.put_codes(panel, g, lane, codes_.data());
        }
    }

   private:
    void put_scale(uint8_t* panel, int64_t offset, int64_t lane, int64_t at) const {
        if (parts_.scales == Scales::kPower) {
            lane_.put(panel, offset, lane, static_cast<const uint8_t*>(from_.scales) + at, 1);
        } else {
            const float scale = static_cast<const float*>(from_.scales)[at];
            put_float(panel, offset, lane, scale, parts_.scales);
        }
    }

    void put_float(uint8_t* panel, int64_t offset, int64_t lane, float value, Scales kind) const {
        Bfloat16 upper;
        Float16 half;
        switch (kind) {
            case Scales::kBfloat16:
                narrow(upper, value);
                return lane_.put(panel, offset, lane, &upper, sizeof upper);
            case Scales::kFloat16:
                narrow(half, value);
                return lane_.put(panel, offset, lane, &half, sizeof half);
            default: lane_.put(panel, offset, lane, &value, sizeof value);
        }
    }

    // Reads `count` inputs of output n from `begin` on, padded with zeros to the group.
    void read_codes(int64_t n, int64_t begin, int64_t count) {
        const auto* values = static_cast<const uint8_t*>(from_.values);
        const int64_t at = n * weight_.inputs + begin;
        std::fill(codes_.begin() + count, codes_.end(),
                  static_cast<uint8_t>(parts_.values == Values::kFloat4 ? 0 : bias_));
        for (int64_t i = 0; i < count; ++i) {
            uint8_t& code = codes_[static_cast<size_t>(i)];
            switch (parts_.values) {
                case Values::kFloat8: code = values[at + i]; break;
                case Values::kFloat4: code = values[(at + i) / 2] >> (at + i) % 2 * 4 & 15; break;
                default: code = static_cast<uint8_t>(values[at + i] + bias_);
            }
        }
    }

    const PackedWeight& weight_;
    const FormatParts& parts_;
    const StoredArrays& from_;
    const int32_t bias_;
    PanelLane lane_;
    std::vector<uint8_t> codes_;
};

}  // namespace

void pack_stored(uint8_t* data, const PackedWeight& weight, const StoredArrays& from,
                 int num_threads) {
    pack_panels(data, weight, num_threads, [&] { return StoredPacker(weight, from); },
                [](StoredPacker& packer, uint8_t* panel, int64_t lane, int64_t n) {
                    if (n >= 0) packer.pack(panel, lane, n);
                });
    if (!weight.is_ordered) return;
    auto* order = reinterpret_cast<int32_t*>(data + packed_bytes(weight) - weight.inputs * 4);
    for (int64_t k = 0; k < weight.inputs; ++k) order[k] = static_cast<int32_t>(from.order[k]);
}

}  // namespace quire
