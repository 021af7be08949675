// Products of integers with multiples (kInt4Multiples) for few rows: included by
// linear_tiles.inc.h. The multiples belong to outputs, so they multiply the sums of a group's
// parts. Those sums are whole numbers below 2^24, which float32 holds exactly. With many rows it is
// less work to multiply the weights, once for all rows (linear_half_tiles.inc.h). Both ways give
// the same sum of a group.
#pragma once

namespace quire {
namespace {

constexpr int64_t kPartWords = kMultipleInputs / 8;
constexpr int64_t kPartBytes = kPartWords * kPanel * 4;           // of a panel
constexpr int64_t kPartVectorBytes = kPartWords * Isa::kLanes * 4;  // whose words follow one another

// Some groups of a panel, `first` of num_groups. block: of the first one, its factors and then its values.
struct MultipliedGroups {
    int64_t num_groups, first, groups;
    const uint8_t* block;
    int64_t block_bytes;
};

// sums += the products of a part. step: where the panel's part begins.
template <bool kFetches, int kRows, int kVectors>
QUIRE_INLINE void add_part(typename Isa::I (&sums)[kRows][kVectors], const uint8_t* w,
                           const int8_t* const (&rows)[kRows], int64_t at, const Ahead& ahead,
                           const uint8_t* step) {
#pragma GCC unroll 1
    for (int64_t i = 0; i < kPartWords; ++i, at += 8, w += Isa::kLanes * 4, step += kPanel * 4) {
        if constexpr (kFetches) ahead.fetch(step);
        typename Isa::I words[kVectors];
        unrolled<kVectors>(
            QUIRE_EACH(v) { words[v] = Isa::load_words(w + v * kPartVectorBytes); });
        unrolled<2>(QUIRE_EACH(half) {
            typename Isa::I operands[kVectors];
            unrolled<kVectors>(QUIRE_EACH(v) {
                operands[v] = half == 0 ? Isa::low_nibbles(words[v]) : Isa::high_nibbles(words[v]);
            });
            unrolled<kRows>(QUIRE_EACH(r) {
                const typename Isa::I inputs = Isa::all_word(rows[r] + at + 4 * half);
                unrolled<kVectors>(
                    QUIRE_EACH(v) { sums[r][v] = Isa::dot_nibbles(sums[r][v], operands[v], inputs); });
            });
        });
    }
}

// acc: where totals of these vectors wait. vector: the first of the panel's.
template <bool kFetches, int kRows, int kVectors>
void multiplied_tile(const Sums& acc, const Operand& x, int64_t row, const MultipliedGroups& some,
                     int64_t vector, const Ahead& ahead) {
    const int8_t* rows[kRows];
    const int32_t* part_sums[kRows];
    unrolled<kRows>(QUIRE_EACH(r) {
        const uint8_t* values = x.values + (row + r) * x.stride;
        rows[r] = reinterpret_cast<const int8_t*>(values);
        part_sums[r] = reinterpret_cast<const int32_t*>(values + some.num_groups * kMultipliedInputs);
    });
    const uint8_t* block = some.block;
    for (int64_t g = some.first; g < some.first + some.groups; ++g, block += some.block_bytes) {
        const uint8_t* factors = block + vector * Isa::kLanes * 4;
        const uint8_t* w = block + kPanel * 4 + vector * kPartVectorBytes;
        if constexpr (kFetches) ahead.fetch(block);
        typename Isa::F multiplied[kRows][kVectors];
        unrolled<kRows * kVectors>(
            QUIRE_EACH(i) { multiplied[i / kVectors][i % kVectors] = Isa::zero(); });
        for (int64_t part = 0; part < kMultipleParts; ++part, w += kPartBytes) {
            const int64_t p = g * kMultipleParts + part;
            typename Isa::I codes[kVectors], is_above[kVectors], sums[kRows][kVectors];
            unrolled<kVectors>(QUIRE_EACH(v) {
                const typename Isa::I words = Isa::load_words(factors + v * Isa::kLanes * 4);
                codes[v] = words >> static_cast<int32_t>(4 * part);
                const auto bit = Isa::template shift_right<3>(codes[v]) & Isa::all(1);
                is_above[v] = Isa::all(0) - bit;
            });
            unrolled<kRows>(QUIRE_EACH(r) {
                // Minus eight times what the inputs add up to, or seven times.
                const typename Isa::I eight = Isa::all_word(part_sums[r] + p);
                const typename Isa::I one = Isa::template shift_right<3>(eight);
                unrolled<kVectors>(QUIRE_EACH(v) { sums[r][v] = eight - (is_above[v] & one); });
            });
            add_part<kFetches>(sums, w, rows, p * kMultipleInputs, ahead, w - vector * kPartVectorBytes);
            unrolled<kVectors>(QUIRE_EACH(v) {
                const auto multiple = Isa::to_float((codes[v] & Isa::all(7)) + Isa::all(1));
                unrolled<kRows>(QUIRE_EACH(r) {
                    multiplied[r][v] = Isa::fma(Isa::to_float(sums[r][v]), multiple, multiplied[r][v]);
                });
            });
        }
        unrolled<kVectors>(QUIRE_EACH(v) {
            const auto scale = Isa::high_halves(Isa::load_words(factors + v * Isa::kLanes * 4));
            unrolled<kRows>(QUIRE_EACH(r) {
                float* place = acc.at + r * acc.stride + v * Isa::kLanes;
                const auto total = g == 0 ? Isa::zero() : Isa::load(place);
                const float own = x.scales[(row + r) * some.num_groups + g];
                const auto both = Isa::times(scale, Isa::all(own));
                Isa::store(place, Isa::fma(multiplied[r][v], both, total));
            });
        });
    }
}

template <class, bool kFetches>
struct MultipliedTile {
    static constexpr int kMinRows = kFetches ? 1 : Isa::kTileRows / 2;
    static constexpr int kWideRows = Isa::kTileRows / 2;
    Sums acc;
    const Operand* x;
    int64_t row;
    MultipliedGroups some;
    Ahead ahead;

    template <int kRows, int kVectors>
    void run(int vector) const {
        const Ahead own = vector == 0 ? ahead : Ahead{0, 0, 0};  // prefetch lines once
        multiplied_tile<kFetches, kRows, kVectors>(acc.from(0, vector * Isa::kLanes), *x, row, some,
                                                   vector, own);
    }
};

// A panel for `rows` rows from `row` on.
void multiplied_panel(const Sums& acc, const PanelLayout& layout, const Operand& x,
                                       int64_t row, int64_t rows, const uint8_t* w) {
    // If one tile has all rows, memory is read in one stream.
    const int64_t fitting = kChunkBytes / layout.block_bytes;
    const int64_t chunk = rows <= Isa::kTileRows || fitting < 1 ? layout.groups : fitting;
    const auto tile = [&](int64_t first, int64_t count, const Ahead& ahead, int64_t g) {
        const int64_t some = layout.groups - g < chunk ? layout.groups - g : chunk;
        const MultipliedGroups groups{layout.groups, g, some, w + layout.block(g), layout.block_bytes};
        run_tile_of<MultipliedTile, void>(count, ahead, acc.from(first, 0), &x, row + first, groups);
    };
    for (int64_t g = 0; g < layout.groups; g += chunk) {
        for_tiles(rows, layout.bytes, kAheadBytes, tile, g);
    }
}

}  // namespace
}  // namespace quire
