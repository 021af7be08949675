// The delta rule over a tile of columns, once for all variants: included by one source file per
// instruction set after that has defined `Isa`. All of it is in an unnamed namespace, so that no
// variant's code is ever shared with another's. What an Isa must have:
//
//   F                vectors of kLanes floats; + - * work on them
//   kVectors         of a tile: columns are kVectors * kLanes
//   all, load, store, fma(a, b, c) = a * b + c
//
// A tile stays in the first level of the cache while the row's tokens pass. It is read and written
// once per token: one pass applies a token's change and computes the next token's sums.
#pragma once

namespace quire {
namespace {

#define QUIRE_INLINE inline __attribute__((always_inline))

using F = typename Isa::F;

constexpr int64_t kLanes = Isa::kLanes;
constexpr int kVectors = Isa::kVectors;
constexpr int64_t kColumns = kLanes * kVectors;
constexpr int64_t kLine = 16;  // floats of a cache line
constexpr int64_t kAhead = 4;  // tokens between the read and the prefetch

// Sums over even d and over odd d.
struct Sums {
    F stored[2][kVectors];
    F queried[2][kVectors];
};

// Rows of columns, `stride` floats apart.
struct Columns {
    float* data;
    int64_t stride;
};

// One row of the tile: changed by the token `now`, and added to the sums of the token `next`.
template <bool kChanges, bool kSums>
QUIRE_INLINE void pass_row(float* to, const float* from, const float* now, const float* next,
                           int64_t dim, F decay, const F (&change)[kVectors],
                           F (&stored)[kVectors], F (&queried)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        F row = Isa::load(from + v * kLanes);
        if constexpr (kChanges) row = Isa::fma(Isa::all(*now), change[v], decay * row);
        Isa::store(to + v * kLanes, row);
        if constexpr (kSums) {
            stored[v] = Isa::fma(Isa::all(next[0]), row, stored[v]);
            queried[v] = Isa::fma(Isa::all(next[dim]), row, queried[v]);
        }
    }
}

template <bool kChanges, bool kSums>
QUIRE_INLINE Sums pass(Columns to, Columns from, int64_t dim, const float* now, const float* next,
                       F decay, const F (&change)[kVectors]) {
    Sums sums{};
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2) {
        pass_row<kChanges, kSums>(to.data + d * to.stride, from.data + d * from.stride, now + d,
                                  next + d, dim, decay, change, sums.stored[0], sums.queried[0]);
        pass_row<kChanges, kSums>(to.data + (d + 1) * to.stride,
                                  from.data + (d + 1) * from.stride, now + d + 1, next + d + 1, dim,
                                  decay, change, sums.stored[1], sums.queried[1]);
    }
    if (d < dim) {
        pass_row<kChanges, kSums>(to.data + d * to.stride, from.data + d * from.stride, now + d,
                                  next + d, dim, decay, change, sums.stored[0], sums.queried[0]);
    }
    return sums;
}

inline void copy_columns(Columns to, Columns from, int64_t dim, int64_t columns) {
    for (int64_t d = 0; d < dim; ++d) {
        std::memcpy(to.data + d * to.stride, from.data + d * from.stride,
                    static_cast<size_t>(columns) * sizeof(float));
    }
}

// One row's tile: the memory while its tokens pass, and where it stands in a block.
template <class T>
class Tile {
   public:
    Tile(const DeltaCall& call, const StateRow& row, int64_t head, int64_t column, float* memory)
        : call_(call), row_(row), heads_(call.rule.heads), memory_{memory, kColumns} {
        const int64_t left = heads_.value_dim - column;
        columns_ = left < kColumns ? left : kColumns;
        const int64_t key_head = head / (heads_.values / heads_.keys);
        keys_ = call.keys + key_head * call.tokens * call.key_stride;
        gates_ = call.gates + head * call.tokens * 2;
        in_state_ = call.layer.size - heads_.memory_size() +
                    head * heads_.key_dim * heads_.value_dim + column;
        in_row_ = head * heads_.value_dim + column;
    }

    void run() {
        const StatePiece* piece = call_.pieces + row_.pieces;
        Sums sums = begin();
        for (int64_t t = row_.first; t < row_.end; ++t) {
            const F decay = Isa::all(gates_[2 * t]);
            F change[kVectors];
            read_out(sums, t, decay, change);
            const bool has_next = t + 1 < row_.end;
            if (has_next) {
                sums = pass<true, true>(memory_, memory_, heads_.key_dim, key(t), key(t + 1),
                                        decay, change);
            }
            if (t + 1 < piece->end) continue;
            if (piece->block >= 0) {
                has_next ? leave(piece->block) : end(piece->block, t, decay, change);
            }
            ++piece;
        }
    }

   private:
    const float* key(int64_t token) const { return keys_ + token * call_.key_stride; }
    Columns in_block(int64_t block) const {
        return {call_.layer.of(block) + in_state_, heads_.value_dim};
    }
    bool is_whole() const { return columns_ == kColumns; }

    // Takes the state that the row begins with.
    Sums begin() {
        if (row_.start < 0 || !is_whole()) {
            const int64_t floats = heads_.key_dim * kColumns;
            std::memset(memory_.data, 0, static_cast<size_t>(floats) * sizeof(float));
            if (row_.start < 0) return {};
            copy_columns(memory_, in_block(row_.start), heads_.key_dim, columns_);
        }
        const Columns from = is_whole() ? in_block(row_.start) : memory_;
        const F none[kVectors] = {};
        const float* first = key(row_.first);
        return pass<false, true>(memory_, from, heads_.key_dim, first, first, F{}, none);
    }

    const T* values(int64_t token) const {
        const HeadRows& qkv = call_.rule.qkv;
        const int64_t keys_size = 2 * heads_.keys * heads_.key_dim;
        return static_cast<const T*>(qkv.data) + token * qkv.stride + keys_size + in_row_;
    }
    T* result(int64_t token) const {
        const HeadRows& out = call_.rule.out;
        return static_cast<T*>(out.data) + token * out.stride + in_row_;
    }

    // Writes the token's result and computes its change. It also prefetches a later token: the
    // CPU's own prefetcher does not follow rows of several pages.
    QUIRE_INLINE void read_out(const Sums& sums, int64_t token, F decay, F (&change)[kVectors]) {
        const int64_t next = token + kAhead < row_.end ? token + kAhead : token;
        for (int64_t c = 0; c < kColumns; c += kLine) {
            __builtin_prefetch(values(next) + c);
            __builtin_prefetch(result(next) + c, 1);
        }
        if (std::is_same_v<T, float> && is_whole()) {
            const auto* from = reinterpret_cast<const float*>(values(token));
            return weigh(sums, token, decay, from, reinterpret_cast<float*>(result(token)), change);
        }
        alignas(64) float widened[kColumns] = {}, made[kColumns];
        for (int64_t c = 0; c < columns_; ++c) widened[c] = widen(values(token)[c]);
        weigh(sums, token, decay, widened, made, change);
        for (int64_t c = 0; c < columns_; ++c) narrow(result(token)[c], made[c]);
    }

    QUIRE_INLINE void weigh(const Sums& sums, int64_t token, F decay, const float* values,
                            float* made, F (&change)[kVectors]) const {
        const F strength = Isa::all(gates_[2 * token + 1]);
        const F product = Isa::all(key(token)[2 * heads_.key_dim]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const F stored = decay * (sums.stored[0][v] + sums.stored[1][v]);
            const F queried = decay * (sums.queried[0][v] + sums.queried[1][v]);
            change[v] = strength * (Isa::load(values + v * kLanes) - stored);
            Isa::store(made + v * kLanes, Isa::fma(product, change[v], queried));
        }
    }

    void leave(int64_t block) const {
        copy_columns(in_block(block), memory_, heads_.key_dim, columns_);
    }

    // The last token's change goes to the block itself.
    void end(int64_t block, int64_t token, F decay, const F (&change)[kVectors]) {
        const Columns to = is_whole() ? in_block(block) : memory_;
        const float* now = key(token);
        pass<true, false>(to, memory_, heads_.key_dim, now, now, decay, change);
        if (!is_whole()) leave(block);
    }

    const DeltaCall& call_;
    const StateRow& row_;
    const DeltaHeads& heads_;
    Columns memory_;
    int64_t columns_;
    const float* keys_;
    const float* gates_;
    int64_t in_state_;  // where its first number stands in a state
    int64_t in_row_;    // and in a token's values and results
};

void run(const DeltaCall& call, const StateRow& row, int64_t head, int64_t column, float* memory) {
    switch (call.rule.qkv.element) {
        case Element::kFloat32: return Tile<float>(call, row, head, column, memory).run();
        case Element::kBfloat16: return Tile<Bfloat16>(call, row, head, column, memory).run();
        default: return Tile<Float16>(call, row, head, column, memory).run();
    }
}

const DeltaKernels kKernels = {Isa::kName, kColumns, run};

}  // namespace
}  // namespace quire
