// Packing of weights, and their quantisation: symmetric, to the nearest, a scale per group.
#include <algorithm>
#include <cstring>
#include <vector>

#include "elements.h"
#include "linear.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr int kInt8Levels = 127, kInt4Levels = 7;
constexpr int kTriedScales = 12;
constexpr int64_t kBlock = 32;  // values of a block of ggml's

int64_t block_bytes(const PackedWeight& weight) {
    return 2 + (weight.format == WeightFormat::kInt8 ? kBlock : kBlock / 2);
}

int64_t panel_of(const PackedWeight& weight) { return linear_kernels(weight.variant).panel; }

// 32-bit words per output (without scales).
int64_t words(const PackedWeight& weight) {
    switch (weight.format) {
        case WeightFormat::kFloat32: return weight.inputs;
        case WeightFormat::kBfloat16:
        case WeightFormat::kFloat16: return (weight.inputs + 1) / 2;
        case WeightFormat::kInt8: return weight.groups() * weight.group / 4;
        default: return weight.groups() * weight.group / 8;
    }
}

float rounded(float scale, bool up) {
    Bfloat16 near;
    narrow(near, scale);
    if (up && widen(near) < scale) ++near.bits;
    return widen(near);
}

QUIRE_VECTOR
float largest_magnitude(const float* w, int64_t count) {
    int32_t peak = 0;
    for (int64_t i = 0; i < count; ++i) peak = std::max(peak, bits_of(w[i]) & 0x7FFFFFFF);
    return float_of(peak);
}

// Rounds to [-levels, levels] times the scale. Adding 1.5 * 2^23 leaves the rounded number in the
// lowest bits.
QUIRE_VECTOR
void quantise(int32_t* out, const float* w, int64_t count, float inverse, int levels) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t value = bits_of(w[i] * inverse + 12582912.0f) - 0x4B400000;
        out[i] = std::min(std::max(value, -levels), levels);
    }
}

// In 16 sums, so that it vectorises; weights outside of a group of 16 are left out.
QUIRE_VECTOR
float squared_error(const float* w, int64_t count, float scale, float inverse, int levels) {
    float sums[16] = {};
    for (int64_t i = 0; i + 16 <= count; i += 16) {
        for (int64_t j = 0; j < 16; ++j) {
            int32_t value = bits_of(w[i + j] * inverse + 12582912.0f) - 0x4B400000;
            value = std::min(std::max(value, -levels), levels);
            const float error = w[i + j] - static_cast<float>(value) * scale;
            sums[j] += error * error;
        }
    }
    float total = 0;
    for (const float sum : sums) total += sum;
    return total;
}

// The scale of a group, exactly a bfloat16. Of int4 the largest weights may be clipped: with 15 levels
// that often costs less than what all others gain by finer steps.
float choose_scale(const float* w, int64_t count, int levels, bool search) {
    const float largest = largest_magnitude(w, count);
    float best = rounded(largest / static_cast<float>(levels), true);
    if (!(best > 0) || !search) return best;
    float least = squared_error(w, count, best, 1.0f / best, levels);
    for (int i = 1; i <= kTriedScales; ++i) {
        const float share = 1.0f - 0.035f * static_cast<float>(i);
        const float scale = rounded(largest * share / static_cast<float>(levels), false);
        if (!(scale > 0)) break;
        const float error = squared_error(w, count, scale, 1.0f / scale, levels);
        if (error < least) {
            least = error;
            best = scale;
        }
    }
    return best;
}

void put(uint8_t* at, const void* value, size_t bytes) { std::memcpy(at, value, bytes); }

// Packs one output of a panel. row: its K inputs, or null for the filling of the last panel.
class OutputPacker {
   public:
    OutputPacker(const PackedWeight& weight, bool search)
        : weight_(weight),
          search_(search),
          panel_(panel_of(weight)),
          offset_(static_cast<int32_t>(weight.format == WeightFormat::kInt8
                                           ? linear_kernels(weight.variant).int8_offset
                                           : kInt4Offset)) {
        const int64_t padded = weight.is_quantised() ? weight.groups() * weight.group : 0;
        row_.resize(static_cast<size_t>(padded));
        integers_.resize(static_cast<size_t>(padded));
    }

    template <class T>
    void pack(uint8_t* panel, int64_t lane, const T* row) {
        if (weight_.is_quantised()) return pack_quantised(panel, lane, row);
        constexpr int64_t size = sizeof(T);
        const bool pairs = weight_.format == WeightFormat::kBfloat16;
        for (int64_t k = 0; k < weight_.inputs; ++k) {
            const int64_t place = pairs ? (k / 2 * panel_ + lane) * 2 + k % 2 : k * panel_ + lane;
            if (row != nullptr) put(panel + place * size, row + k, size);
        }
    }

    // row: blocks of 32, each a float16 scale and its integers (ggml's Q8_0, Q4_0), or null.
    void pack_blocks(uint8_t* panel, int64_t lane, const uint8_t* row) {
        std::fill(integers_.begin(), integers_.end(), 0);
        const int64_t bytes = block_bytes(weight_);
        for (int64_t g = 0; g < weight_.groups(); ++g) {
            Float16 scale{};
            if (row != nullptr) {
                std::memcpy(&scale, row + g * bytes, sizeof scale);
                read_block(integers_.data() + g * kBlock, row + g * bytes + sizeof scale);
            }
            put_group(panel, lane, g, widen(scale));
        }
    }

   private:
    void read_block(int32_t* out, const uint8_t* stored) const {
        for (int64_t i = 0; i < kBlock; ++i) {
            if (weight_.format == WeightFormat::kInt8) {
                out[i] = static_cast<int8_t>(stored[i]);
            } else {  // the first half of the values is in the low halves of the bytes
                const int nibble = (stored[i % 16] >> (i / 16 * 4)) & 15;
                out[i] = nibble - static_cast<int>(kInt4Offset);
            }
        }
    }

    template <class T>
    void pack_quantised(uint8_t* panel, int64_t lane, const T* row) {
        std::fill(row_.begin(), row_.end(), 0.0f);
        if (row != nullptr) {
            for (int64_t k = 0; k < weight_.inputs; ++k) row_[static_cast<size_t>(k)] = widen(row[k]);
        }
        const int levels = weight_.format == WeightFormat::kInt8 ? kInt8Levels : kInt4Levels;
        const int64_t group = weight_.group;
        for (int64_t g = 0; g < weight_.groups(); ++g) {
            const float* values = row_.data() + g * group;
            int32_t* integers = integers_.data() + g * group;
            const int64_t count = std::min(group, weight_.inputs - g * group);
            const float scale = choose_scale(values, count, levels, search_);
            quantise(integers, values, group, scale > 0 ? 1.0f / scale : 0.0f, levels);
            put_group(panel, lane, g, scale);
        }
    }

    // The integers of group g, and their scale.
    void put_group(uint8_t* panel, int64_t lane, int64_t g, float scale) {
        const int64_t group_words = words(weight_) / weight_.groups();
        const int32_t* integers = integers_.data() + g * weight_.group;
        Bfloat16 stored;
        narrow(stored, scale);
        uint8_t* begin = panel + g * panel_ * (2 + 4 * group_words);
        put(begin + lane * 2, &stored, 2);
        for (int64_t word = 0; word < group_words; ++word) {
            const uint32_t bits = word_of(integers, word);
            put(begin + panel_ * 2 + (word * panel_ + lane) * 4, &bits, 4);
        }
    }

    uint32_t word_of(const int32_t* integers, int64_t word) const {
        uint32_t bits = 0;
        if (weight_.format == WeightFormat::kInt8) {
            for (int64_t j = 0; j < 4; ++j) {
                bits |= (static_cast<uint32_t>(integers[4 * word + j] + offset_) & 0xFFu) << (8 * j);
            }
        } else {
            for (int64_t j = 0; j < 8; ++j) {
                const auto nibble = static_cast<uint32_t>(integers[8 * word + j] + offset_) & 15u;
                bits |= nibble << (8 * (j % 4) + 4 * (j / 4));
            }
        }
        return bits;
    }

    const PackedWeight& weight_;
    const bool search_;
    const int64_t panel_;
    const int32_t offset_;
    std::vector<float> row_;
    std::vector<int32_t> integers_;
};

// Calls pack_row(packer, panel, lane, n) for each output n; n is -1 for the filling of the last panel.
template <class PackRow>
void pack_panels(uint8_t* data, const PackedWeight& weight, bool search, int num_threads,
                 PackRow pack_row) {
    const int64_t panel = panel_of(weight), bytes = packed_panel_bytes(weight);
    const int64_t panels = (weight.outputs + panel - 1) / panel;
    parallel_for(panels, num_threads, [&](int64_t begin, int64_t end) {
        OutputPacker packer(weight, search);
        for (int64_t p = begin; p < end; ++p) {
            uint8_t* to = data + p * bytes;
            std::memset(to, 0, static_cast<size_t>(bytes));
            for (int64_t lane = 0; lane < panel; ++lane) {
                const int64_t n = p * panel + lane;
                pack_row(packer, to, lane, n < weight.outputs ? n : -1);
            }
        }
    });
}

template <class T>
void pack_elements(uint8_t* data, const PackedWeight& weight, const Matrix& from, bool search,
                   int num_threads) {
    const auto* values = static_cast<const T*>(from.data);
    pack_panels(data, weight, search, num_threads,
                [&](OutputPacker& packer, uint8_t* panel, int64_t lane, int64_t n) {
                    packer.pack(panel, lane, n < 0 ? nullptr : values + n * from.stride);
                });
}

// Input k of the output in `lane` of a panel.
float unpacked(const PackedWeight& weight, const uint8_t* panel, int64_t lane, int64_t k) {
    const int64_t width = panel_of(weight);
    const auto element = [&](auto sample, int64_t place) {
        std::memcpy(&sample, panel + place * static_cast<int64_t>(sizeof sample), sizeof sample);
        return widen(sample);
    };
    switch (weight.format) {
        case WeightFormat::kFloat32: return element(0.0f, k * width + lane);
        case WeightFormat::kFloat16: return element(Float16{}, k * width + lane);
        case WeightFormat::kBfloat16:
            return element(Bfloat16{}, (k / 2 * width + lane) * 2 + k % 2);
        default: break;
    }
    const bool is_int8 = weight.format == WeightFormat::kInt8;
    const int64_t depth = is_int8 ? 4 : 8, in_group = k % weight.group;
    panel += k / weight.group * width * (2 + 4 * weight.group / depth);
    Bfloat16 scale;
    std::memcpy(&scale, panel + lane * 2, sizeof scale);
    const uint8_t byte = panel[width * 2 + (in_group / depth * width + lane) * 4 + k % 4];
    const int64_t offset = is_int8 ? linear_kernels(weight.variant).int8_offset : kInt4Offset;
    const uint8_t stored = is_int8 ? byte : (byte >> (k % 8 / 4 * 4)) & 15;
    const auto value = is_int8 ? static_cast<int8_t>(stored - offset) : stored - offset;
    return static_cast<float>(value) * widen(scale);
}

template <class T>
void unpack_row(T* out, const PackedWeight& weight, int64_t n) {
    const int64_t width = panel_of(weight);
    const uint8_t* panel = weight.data + n / width * packed_panel_bytes(weight);
    for (int64_t k = 0; k < weight.inputs; ++k) narrow(out[k], unpacked(weight, panel, n % width, k));
}

}  // namespace

int64_t packed_panel_bytes(const PackedWeight& weight) {
    const int64_t scales = weight.is_quantised() ? weight.groups() : 0;
    return panel_of(weight) * (4 * words(weight) + 2 * scales);
}

int64_t packed_bytes(const PackedWeight& weight) {
    const int64_t panel = panel_of(weight);
    return (weight.outputs + panel - 1) / panel * packed_panel_bytes(weight);
}

void pack_weight(uint8_t* data, const PackedWeight& weight, const Matrix& from, bool search,
                 int num_threads) {
    switch (from.element) {
        case Element::kFloat32:
            return pack_elements<float>(data, weight, from, search, num_threads);
        case Element::kBfloat16:
            return pack_elements<Bfloat16>(data, weight, from, search, num_threads);
        default: return pack_elements<Float16>(data, weight, from, search, num_threads);
    }
}

void pack_blocks(uint8_t* data, const PackedWeight& weight, const uint8_t* blocks,
                 int num_threads) {
    const int64_t row_bytes = weight.groups() * block_bytes(weight);
    pack_panels(data, weight, false, num_threads,
                [&](OutputPacker& packer, uint8_t* panel, int64_t lane, int64_t n) {
                    packer.pack_blocks(panel, lane, n < 0 ? nullptr : blocks + n * row_bytes);
                });
}

void unpack_rows(const MutableMatrix& out, const PackedWeight& weight, const int64_t* ids) {
    for (int64_t i = 0; i < out.rows; ++i) {
        switch (out.element) {
            case Element::kFloat32:
                unpack_row(static_cast<float*>(out.data) + i * out.stride, weight, ids[i]);
                break;
            case Element::kBfloat16:
                unpack_row(static_cast<Bfloat16*>(out.data) + i * out.stride, weight, ids[i]);
                break;
            default: unpack_row(static_cast<Float16*>(out.data) + i * out.stride, weight, ids[i]);
        }
    }
}

}  // namespace quire
