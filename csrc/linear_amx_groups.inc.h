// Products of tiles of integers: included by linear_amx.cpp. Sums within a group are exact, so few
// rows may use other instructions. The sums of groups are added as in linear_half_tiles.inc.h, with
// the same bits. An int8 panel has the layout of tiles; other formats are converted to bytes first,
// once for all rows.
#pragma once

namespace quire {
namespace {

// Inputs of a group that are multiplied at once: all steps of a group have the same number of them.
int64_t inputs_of_step(int64_t group) {
    int64_t inputs = kTileBytes;
    while (group % inputs != 0) inputs -= 4;
    return inputs;
}

// Rows of some groups, whose values begin at `w` in the layout of int8.
struct MatrixGroups {
    HalfGroups groups;
    int64_t step_inputs;
    const uint8_t* w;
};

// acc += what the sums of group `g` come to, with the bits of add_sum and add_offset. sums: [rows,
// columns of the block]. kBias: whether they lack what the bias adds.
template <int kVectors, bool kOffsets, bool kBias>
void add_group_sums(float* acc, const int32_t* sums, const Operand& x, int64_t row, int64_t rows,
                    const HalfGroups& part, int64_t g, int64_t lane) {
    const float* factors = part.scales + g * kPanel + lane;
    const int64_t offsets = part.offsets - part.scales;
    typename Isa::F scales[kVectors];
    unrolled<kVectors>(QUIRE_EACH(v) { scales[v] = Isa::load(factors + v * Isa::kLanes); });
    const bool is_first = part.first + g == 0;
    int64_t at = row * part.num_groups + part.first + g;
    for (int64_t r = 0; r < rows; ++r, at += part.num_groups) {
        const typename Isa::F scale = Isa::all(x.scales[at]);
        const typename Isa::I start = Isa::all(kBias ? x.sums[at] : 0);
        unrolled<kVectors>(QUIRE_EACH(v) {
            typename Isa::I sum = Isa::load_words(sums + v * Isa::kLanes);
            if constexpr (kBias) sum += start;
            float* place = acc + v * Isa::kLanes;
            typename Isa::F total = is_first ? Isa::zero() : Isa::load(place);
            total = Isa::fma(Isa::to_float(sum), Isa::times(scales[v], scale), total);
            if constexpr (kOffsets) {
                const typename Isa::F offset = Isa::load(factors + offsets + v * Isa::kLanes);
                total = add_offset(total, offset, x, at, part.bias);
            }
            Isa::store(place, total);
        });
        acc += kPanel;
        sums += kVectors * Isa::kLanes;
    }
}

// A block's sums of each group are added up while the next group's are computed.
template <class Dots, bool kOffsets, bool kBias, int kHeight>
void grouped_block(float* acc, const Operand& x, int64_t row, int64_t rows, const MatrixGroups& part,
                   int64_t lane, Trickle ahead) {
    using S = Shape<kHeight>;
    constexpr int64_t kInts = kHeight * kTileHeight * S::kColumns;
    const HalfGroups& groups = part.groups;
    alignas(64) int32_t sums[2][kInts];
    const uint8_t *w = part.w + lane * 4, *values = x.values + row * x.stride;
    values += groups.first * groups.inputs;
    const auto add = [&](int64_t g) {
        add_group_sums<S::kWidth, kOffsets, kBias>(acc + lane, sums[g % 2], x, row, rows, groups, g,
                                                   lane);
    };
    int64_t left = groups.block_groups;
    for (int64_t g = 0; g < groups.groups; ++g) {
        unrolled<kSumTiles>(QUIRE_EACH(t) { Tiles::zero<t>(); });
        for (int64_t done = 0; done < groups.inputs; done += part.step_inputs) {
            ahead.fetch();
            add_matrices<Dots, kHeight>(values, x.stride, w);
            values += part.step_inputs;
            w += part.step_inputs * kPanel;
        }
        if (--left == 0) {
            w += groups.gap;
            left = groups.block_groups;
        }
        unrolled<kSumTiles>(QUIRE_EACH(t) {
            constexpr int r = t / S::kWidth, v = t % S::kWidth;
            Tiles::store<t>(sums[g % 2] + r * kTileHeight * S::kColumns + v * kTileHeight,
                            S::kColumns * 4);
        });
        if (g > 0) add(g - 1);
    }
    add(groups.groups - 1);
}

// Groups that are done together: whole blocks that fit into the first cache, at least one.
int64_t groups_together(const PanelLayout& layout, int64_t group) {
    const int64_t block_bytes = layout.block_groups * group * kPanel;  // unpacked
    const int64_t fitting = kUnpackedMatrixBytes / block_bytes * layout.block_groups;
    const int64_t max_groups = fitting < kFactorGroups ? fitting : kFactorGroups;
    return max_groups < 1 ? layout.block_groups : max_groups;
}

// Returns whether a block of groups fits into the first-level cache.
bool has_small_blocks(const PackedWeight& weight, const PanelLayout& layout) {
    return layout.block_groups * weight.group * kPanel <= kUnpackedMatrixBytes;
}

// Returns the `count` groups from `g`, with their factors; their values begin at `w`.
MatrixGroups groups_from(const Product& product, const PlainFactors& factors, int64_t g,
                         int64_t count, int64_t gap, const uint8_t* w) {
    const PanelLayout& layout = product.layout;
    const int64_t group = product.weight.group;
    const HalfGroups some{layout.groups,       g,
                          count,               group,
                          layout.block_groups, gap,
                          factors.scales,      factors.offsets,
                          stored_bias(product.weight)};
    return {some, inputs_of_step(group), w};
}

template <WeightFormat kFormat>
void grouped_matrices(float* acc, const Product& product, int64_t row, int64_t rows,
                      const uint8_t* w) {
    using Weight = typename WeightOf<parts_of(kFormat).values>::Type;
    constexpr bool kOffsets = Factors<kFormat>::kHasOffsets;
    constexpr bool kUnpacks = !std::is_same_v<Weight, Int8Weight>;
    using Dots = std::conditional_t<kUnpacks, SignedDots, UnsignedDots>;
    const PanelLayout& layout = product.layout;
    const int64_t group = product.weight.group, max_groups = groups_together(layout, group);
    const int64_t blocks = blocks_of(rows);
    PlainFactors factors;
    alignas(64) uint8_t bytes[kUnpacks ? kUnpackedMatrixBytes : 64];
    for (int64_t g = 0; g < layout.groups; g += max_groups) {
        const int64_t count = layout.groups - g < max_groups ? layout.groups - g : max_groups;
        const uint8_t *block = w + layout.block(g), *values = block + layout.factor_bytes;
        const int64_t next_bytes = count / layout.block_groups * layout.block_bytes;
        decode_factors<kFormat>(factors, layout, block, count, next_bytes);
        if constexpr (kUnpacks) {
            const __m512i bias = _mm512_set1_epi8(static_cast<char>(stored_bias(product.weight)));
            unpack_bytes<Weight>(bytes, layout, block, count, group / Weight::kDepth, [&](auto codes) {
                return Isa::words_of(_mm512_sub_epi8(Isa::raw(codes), bias));
            });
            values = bytes;
        }
        const int64_t gap = kUnpacks ? 0 : layout.factor_bytes;
        const MatrixGroups part = groups_from(product, factors, g, count, gap, values);
        const int64_t steps = count * (group / part.step_inputs);
        for_blocks(rows, [&](auto height, int64_t first, int64_t own, int64_t lane, int64_t number) {
            product.tiles.set(own, part.step_inputs);
            grouped_block<Dots, kOffsets, !kUnpacks, height>(
                acc + first * kPanel, product.x, row + first, own, part, lane,
                share_of(product, row, block + next_bytes, next_bytes, number, blocks, steps));
        });
    }
}

// Multiplies int8 in groups so large that their sums are kept in memory.
template <WeightFormat kFormat>
void large_groups(float* acc, const Product& product, int64_t row, int64_t rows, const uint8_t* w) {
    const PanelLayout& layout = product.layout;
    const int64_t group = product.weight.group, row_bytes = inputs_of_step(group);
    PlainFactors factors;
    alignas(64) int32_t sums[kMatrixRows * kPanel];
    const uint8_t* x = product.x.values + row * product.x.stride;
    for (int64_t g = 0; g < layout.groups; ++g, w += layout.block_bytes, x += group) {
        decode_factors<kFormat>(factors, layout, w, 1, layout.block_bytes);
        const MatrixGroups part = groups_from(product, factors, g, 1, 0, w + layout.factor_bytes);
        add_stretches<UnsignedDots>(reinterpret_cast<uint8_t*>(sums), product, row, rows, x, part.w,
                                    group / row_bytes, row_bytes);
        add_group_sums<Isa::kVectors, Factors<kFormat>::kHasOffsets, true>(
            acc, sums, product.x, row, rows, part.groups, 0, 0);
    }
}

}  // namespace
}  // namespace quire
