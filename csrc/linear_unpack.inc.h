// Weights as int8 stand, once for all rows, where that is less work than to do it in each tile.
#pragma once

namespace quire {
namespace {

// 32 inputs, a part of a group, in four words; what is loaded are products with the part's multiple.
struct MultiplesWeight {
    static constexpr int64_t kDepth = kMultipleInputs, kWords = kDepth / 8;
    static constexpr int64_t kVectorBytes = kWords * Isa::kLanes * 4;
    struct Loaded {
        typename Isa::I operands[2 * kWords];
    };
    // factors: the group's, of the vector's outputs.
    static QUIRE_INLINE typename Isa::Multiples multiples(const uint8_t* factors, int64_t part) {
        return Isa::multiples(Isa::load_words(factors) >> static_cast<int32_t>(4 * part));
    }
    static QUIRE_INLINE Loaded load(const uint8_t* w, const typename Isa::Multiples& multiples) {
        Loaded loaded;
        unrolled<kWords>(QUIRE_EACH(i) {
            const typename Isa::I words = Isa::load_words(w + i * Isa::kLanes * 4);
            loaded.operands[2 * i] = Isa::multiplied(words, multiples);
            loaded.operands[2 * i + 1] =
                Isa::multiplied(Isa::template shift_right<4>(words), multiples);
        });
        return loaded;
    }
    static constexpr int kOperands = 2 * kWords;
    template <int i>
    static QUIRE_INLINE typename Isa::I operand(const Loaded& w) {
        return w.operands[i];
    }
};

template <>
struct WeightOf<Values::kInt4Multiples> { using Type = MultiplesWeight; };

template <class Weight>
constexpr bool kHasMultiples = std::is_same_v<Weight, MultiplesWeight>;

// A vector's weights of a step. factors: the group's, of the vector's outputs.
template <class Weight>
QUIRE_INLINE typename Weight::Loaded load_step(const uint8_t* w, const uint8_t* factors, int64_t step) {
    if constexpr (kHasMultiples<Weight>) {
        return Weight::load(w, Weight::multiples(factors, step));
    } else {
        return Weight::load(w);
    }
}

// Unpacks the values of some groups to the layout of int8. changed: maps each operand's bytes.
template <class Weight, class Changed>
void unpack_bytes(uint8_t* to, const PanelLayout& layout, const uint8_t* block, int64_t groups,
                  int64_t steps, const Changed& changed) {
    for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* w = block + layout.values(g);
        for (int64_t s = 0; s < steps; ++s, w += Weight::kWords * kPanel * 4) {
            unrolled<Isa::kVectors>(QUIRE_EACH(v) {
                const uint8_t* factors = block + layout.scales(g) + v * Isa::kLanes * 4;
                const auto loaded = load_step<Weight>(w + v * Weight::kVectorBytes, factors, s);
                unrolled<Weight::kOperands>(QUIRE_EACH(i) {
                    Isa::store_words(to + i * kPanel * 4 + v * Int8Weight::kVectorBytes,
                                     changed(Weight::template operand<i>(loaded)));
                });
            });
            to += Weight::kOperands * kPanel * 4;
        }
    }
}

}  // namespace
}  // namespace quire
