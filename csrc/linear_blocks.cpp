// Packing of rows that are blocks of ggml's, whose numbers stay what they are.
//
// A block holds 32 values (256 in the K formats) and its factors. A byte of 4-bit codes holds two
// values that are half a group apart, the low bits first. models/gguf/dequantise.py draws the
// blocks.
#include <vector>

#include "elements.h"
#include "linear.h"
#include "linear_panel.h"

namespace quire {
namespace {

constexpr int64_t kBlock = 32;

// A decoded block: its integers, and the integers and float16 numbers that multiply them.
struct Block {
    uint8_t codes[kNestedInputs];
    uint8_t scales[16], minima[16];  // of groups, where they are nested
    const uint8_t* scale;            // float16; of MXFP4 an exponent
    const uint8_t* minimum;          // float16, or null
};

// Bits [shift, shift + bits) of a byte.
uint8_t field(uint8_t byte, int shift, int bits) {
    return static_cast<uint8_t>(byte >> shift & ((1 << bits) - 1));
}

void low_and_high(uint8_t* codes, const uint8_t* packed, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        codes[i] = packed[i] & 15;
        codes[count + i] = packed[i] >> 4;
    }
}

void read_q8_0(Block& block, const uint8_t* at) {
    block.scale = at;
    for (int64_t i = 0; i < kBlock; ++i) block.codes[i] = at[2 + i];  // a bias is added later
}

void read_mxfp4(Block& block, const uint8_t* at) {
    block.scale = at;
    low_and_high(block.codes, at + 1, kBlock / 2);
}

void read_q4(Block& block, const uint8_t* at, bool has_minimum) {
    block.scale = at;
    block.minimum = has_minimum ? at + 2 : nullptr;
    low_and_high(block.codes, at + (has_minimum ? 4 : 2), kBlock / 2);
}

void read_q5(Block& block, const uint8_t* at, bool has_minimum) {
    block.scale = at;
    block.minimum = has_minimum ? at + 2 : nullptr;
    at += has_minimum ? 4 : 2;
    uint32_t fifth;
    std::memcpy(&fifth, at, sizeof fifth);
    low_and_high(block.codes, at + 4, kBlock / 2);
    for (int64_t i = 0; i < kBlock; ++i) {
        block.codes[i] |= static_cast<uint8_t>((fifth >> i & 1) << 4);
    }
}

// 4 x 2 bits of 32 bytes are 128 values.
void read_pairs(uint8_t* codes, const uint8_t* packed) {
    for (int64_t i = 0; i < kNestedInputs; ++i) {
        codes[i] = field(packed[i / 128 * 32 + i % 32], static_cast<int>(i % 128 / 32 * 2), 2);
    }
}

void read_q2_k(Block& block, const uint8_t* at) {
    for (int g = 0; g < 16; ++g) {
        block.scales[g] = at[g] & 15;
        block.minima[g] = at[g] >> 4;
    }
    read_pairs(block.codes, at + 16);
    block.scale = at + 80;
    block.minimum = at + 82;
}

// The third bit is inverted: where it is 0, 4 is taken off, which is the format's bias.
void read_q3_k(Block& block, const uint8_t* at) {
    read_pairs(block.codes, at + 32);
    for (int64_t i = 0; i < kNestedInputs; ++i) {
        block.codes[i] |= static_cast<uint8_t>(field(at[i % 32], static_cast<int>(i / 32), 1) << 2);
    }
    const uint8_t* packed = at + 96;
    for (int g = 0; g < 16; ++g) {
        const uint8_t low = field(packed[g % 8], g / 8 * 4, 4);
        const uint8_t high = field(packed[8 + g % 4], g / 4 * 2, 2);
        block.scales[g] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    block.scale = at + 108;
}

// 8 scales and 8 minima of 6 bits in 12 bytes.
void read_scales(Block& block, const uint8_t* packed) {
    for (int g = 0; g < 4; ++g) {
        const uint8_t first = packed[g], second = packed[4 + g], low = packed[8 + g];
        block.scales[g] = first & 63;
        block.minima[g] = second & 63;
        block.scales[4 + g] = static_cast<uint8_t>((low & 15) | first >> 6 << 4);
        block.minima[4 + g] = static_cast<uint8_t>(low >> 4 | second >> 6 << 4);
    }
}

void read_q4_k(Block& block, const uint8_t* at) {
    block.scale = at;
    block.minimum = at + 2;
    read_scales(block, at + 4);
    for (int64_t i = 0; i < 4; ++i) low_and_high(block.codes + i * 64, at + 16 + i * 32, 32);
}

void read_q5_k(Block& block, const uint8_t* at) {
    block.scale = at;
    block.minimum = at + 2;
    read_scales(block, at + 4);
    for (int64_t i = 0; i < 4; ++i) low_and_high(block.codes + i * 64, at + 48 + i * 32, 32);
    for (int64_t i = 0; i < kNestedInputs; ++i) {
        const uint8_t fifth = field(at[16 + i % 32], static_cast<int>(i / 32), 1);
        block.codes[i] |= static_cast<uint8_t>(fifth << 4);
    }
}

void read_q6_k(Block& block, const uint8_t* at) {
    read_pairs(block.codes, at + 128);
    for (int64_t half = 0; half < 2; ++half) {
        uint8_t low[128];
        low_and_high(low, at + half * 64, 64);
        uint8_t* codes = block.codes + half * 128;
        for (int64_t i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(codes[i] << 4 | low[i]);
    }
    std::memcpy(block.scales, at + 192, 16);
    block.scale = at + 208;
}

struct BlockKind {
    int64_t inputs, bytes;
    void (*read)(Block&, const uint8_t*);
};

BlockKind kind_of(WeightFormat format) {
    switch (format) {
        case WeightFormat::kInt8F16: return {32, 34, read_q8_0};
        case WeightFormat::kInt4F16:
            return {32, 18, [](Block& b, const uint8_t* at) { read_q4(b, at, false); }};
        case WeightFormat::kFloat4: return {32, 17, read_mxfp4};
        case WeightFormat::kQ4_1:
            return {32, 20, [](Block& b, const uint8_t* at) { read_q4(b, at, true); }};
        case WeightFormat::kQ5_0:
            return {32, 22, [](Block& b, const uint8_t* at) { read_q5(b, at, false); }};
        case WeightFormat::kQ5_1:
            return {32, 24, [](Block& b, const uint8_t* at) { read_q5(b, at, true); }};
        case WeightFormat::kQ2_K: return {256, 84, read_q2_k};
        case WeightFormat::kQ3_K: return {256, 110, read_q3_k};
        case WeightFormat::kQ4_K: return {256, 144, read_q4_k};
        case WeightFormat::kQ5_K: return {256, 176, read_q5_k};
        default: return {256, 210, read_q6_k};
    }
}

class BlockPacker {
   public:
    explicit BlockPacker(const PackedWeight& weight)
        : weight_(weight),
          parts_(weight.parts()),
          kind_(kind_of(weight.format)),
          bias_(parts_.values == Values::kInt8 ? stored_bias(weight) : 0),
          lane_(weight) {}

    void pack(uint8_t* panel, int64_t lane, const uint8_t* row) {
        const PanelLayout& layout = lane_.layout();
        const bool is_nested = parts_.scales == Scales::kNested;
        const int64_t block_groups = kind_.inputs / weight_.group;
        for (int64_t b = 0; b < weight_.inputs / kind_.inputs; ++b) {
            kind_.read(block_, row + b * kind_.bytes);
            const int64_t first = b * block_groups;
            const int64_t scale = is_nested ? layout.block(first) : layout.scales(first);
            const int64_t minimum = is_nested ? scale + layout.panel * 2 : layout.offsets(first);
            const size_t scale_bytes = parts_.scales == Scales::kPower ? 1 : 2;
            lane_.put(panel, scale, lane, block_.scale, scale_bytes);
            if (block_.minimum != nullptr) lane_.put(panel, minimum, lane, block_.minimum, 2);
            for (int64_t g = 0; g < block_groups; ++g) put_group(panel, lane, first + g, g);
        }
    }

   private:
    // Group g of the row, group `own` of the block.
    void put_group(uint8_t* panel, int64_t lane, int64_t g, int64_t own) {
        const PanelLayout& layout = lane_.layout();
        uint8_t* codes = block_.codes + own * weight_.group;
        for (int64_t i = 0; bias_ != 0 && i < weight_.group; ++i) {
            codes[i] = static_cast<uint8_t>(codes[i] + bias_);
        }
        lane_.put_codes(panel, g, lane, codes);
        if (parts_.scales != Scales::kNested) return;
        lane_.put(panel, layout.scales(g), lane, block_.scales + own, 1);
        if (parts_.offsets == Offsets::kNested) {
            lane_.put(panel, layout.offsets(g), lane, block_.minima + own, 1);
        }
    }

    const PackedWeight& weight_;
    const FormatParts& parts_;
    const BlockKind kind_;
    const int32_t bias_;
    PanelLane lane_;
    Block block_{};
};

}  // namespace

void pack_blocks(uint8_t* data, const PackedWeight& weight, const uint8_t* blocks,
                 int64_t row_bytes, int num_threads) {
    pack_panels(data, weight, num_threads, [&] { return BlockPacker(weight); },
                [&](BlockPacker& packer, uint8_t* panel, int64_t lane, int64_t n) {
                    if (n >= 0) packer.pack(panel, lane, blocks + n * row_bytes);
                });
}

}  // namespace quire
