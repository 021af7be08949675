#include "adapters.h"

#include <algorithm>
#include <tuple>

#include "elements.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kRowsAtOnce = 4;   // rows that share one read of `down`
constexpr int64_t kBlockOutputs = 256;    // the least outputs of one thread
constexpr int64_t kOutputsAtOnce = 2048;  // whose sums stay in the first cache
constexpr int64_t kLinesAtOnce = 4;       // lines of `up` that are read together
constexpr int64_t kAloneProducts = 1 << 16;  // that one thread does before another wakes

// One part of one group: where its low-rank products begin, [rows, rank].
struct Piece {
    const AdapterUse* use;
    const AdapterPart* part;
    int64_t low;    // index of its first number in low_
    int64_t ranks;  // ranks of the pieces before it
    int64_t blocks; // blocks of outputs of the pieces before it

    int64_t rows() const { return use->count; }
};

int64_t blocks_of(const AdapterPart& part) {
    return (part.outputs + kBlockOutputs - 1) / kBlockOutputs;
}

// low[i] = x[i] . down for each of the rows.
template <int64_t rows, class T>
inline __attribute__((always_inline)) void dot(float* low, int64_t stride, const float* const* x,
                                               const T* down, int64_t inputs) {
    const int64_t whole = inputs / kLanes * kLanes;
    float sums[rows][kLanes] = {};  // a fixed number of rows, so that they stay in registers
    for (int64_t k = 0; k < whole; k += kLanes) {
        float values[kLanes];
        for (int64_t lane = 0; lane < kLanes; ++lane) values[lane] = widen(down[k + lane]);
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                sums[i][lane] += x[i][k + lane] * values[lane];
            }
        }
    }
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t k = whole; k < inputs; ++k) sums[i][k - whole] += x[i][k] * widen(down[k]);
        float total = 0;
        for (int64_t lane = 0; lane < kLanes; ++lane) total += sums[i][lane];
        low[i * stride] = total;
    }
}

// sums[n] += low[r] up[r, n] for `ranks` rows of `up`, in their order, and `count` outputs. Several
// rows at once are read as several streams, which hides the latency of memory.
template <int64_t ranks, class T>
inline __attribute__((always_inline)) void add_lines(float* __restrict sums, const float* low,
                                                     const T* up, int64_t stride, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
        float sum = sums[n];
        for (int64_t r = 0; r < ranks; ++r) sum += low[r] * widen(up[r * stride + n]);
        sums[n] = sum;
    }
}

// out[n] += sum over r of low[r] up[r, n], for `count` outputs; rows of `up` are `stride` apart.
template <class T>
inline __attribute__((always_inline)) void add(float* out, const float* low, const T* up,
                                               int64_t rank, int64_t stride, int64_t count) {
    float sums[kOutputsAtOnce];
    std::fill(sums, sums + count, 0.0f);
    int64_t r = 0;
    for (; r + kLinesAtOnce <= rank; r += kLinesAtOnce) {
        add_lines<kLinesAtOnce>(sums, low + r, up + r * stride, stride, count);
    }
    for (; r < rank; ++r) add_lines<1>(sums, low + r, up + r * stride, stride, count);
    for (int64_t n = 0; n < count; ++n) out[n] += sums[n];
}

// Templates have no clones for instruction sets, so each element has functions of its own.
#define QUIRE_ADAPTER_ROWS(T)                                                                      \
    QUIRE_VECTOR void dot_rows(float* low, int64_t stride, const float* const* x, int64_t rows,    \
                               const T* down, int64_t inputs) {                                    \
        switch (rows) {                                                                            \
            case 1: return dot<1>(low, stride, x, down, inputs);                                   \
            case 2: return dot<2>(low, stride, x, down, inputs);                                   \
            case 3: return dot<3>(low, stride, x, down, inputs);                                   \
            default: return dot<kRowsAtOnce>(low, stride, x, down, inputs);                        \
        }                                                                                          \
    }                                                                                              \
    QUIRE_VECTOR void add_row(float* out, const float* low, const T* up, int64_t rank,             \
                              int64_t stride, int64_t count) {                                     \
        add(out, low, up, rank, stride, count);                                                    \
    }
QUIRE_ADAPTER_ROWS(float)
QUIRE_ADAPTER_ROWS(Bfloat16)
QUIRE_ADAPTER_ROWS(Float16)
#undef QUIRE_ADAPTER_ROWS

// Computes ranks [begin, end) of a piece.
template <class T>
void go_down(float* low, const Piece& piece, const Matrix& x, int64_t begin, int64_t end) {
    const auto* all = static_cast<const float*>(x.data);
    const auto* down = static_cast<const T*>(piece.part->down);
    const int64_t rank = piece.part->rank;
    for (int64_t first = 0; first < piece.rows(); first += kRowsAtOnce) {
        const int64_t rows = std::min(kRowsAtOnce, piece.rows() - first);
        const float* own[kRowsAtOnce] = {};
        for (int64_t i = 0; i < rows; ++i) own[i] = all + piece.use->from[first + i] * x.stride;
        for (int64_t r = begin; r < end; ++r) {
            float* to = low + piece.low + first * rank + r;
            dot_rows(to, rank, own, rows, down + r * x.columns, x.columns);
            for (int64_t i = 0; i < rows; ++i) to[i * rank] *= piece.part->scale;
        }
    }
}

// Adds blocks [begin, end) of a piece's outputs.
template <class T>
void go_up(const MutableMatrix& out, const Piece& piece, const float* low, int64_t begin,
           int64_t end) {
    const AdapterPart& part = *piece.part;
    // Few rows read long lines of `up` from memory. Many rows read a short block of it again and again.
    const int64_t at_once = piece.rows() < kRowsAtOnce ? kOutputsAtOnce : kBlockOutputs;
    const int64_t last = std::min(end * kBlockOutputs, part.outputs);
    for (int64_t n = begin * kBlockOutputs; n < last; n += at_once) {
        const int64_t count = std::min(at_once, last - n);
        for (int64_t i = 0; i < piece.rows(); ++i) {
            float* row = static_cast<float*>(out.data) + piece.use->to[i] * out.stride;
            add_row(row + part.first + n, low + piece.low + i * part.rank,
                    static_cast<const T*>(part.up) + n, part.rank, part.outputs, count);
        }
    }
}

// Calls work(piece, begin, end) for the parts of [0, total) that lie in each piece. The units before a
// piece are its member `before`.
template <class Work>
void for_pieces(const std::vector<Piece>& pieces, int64_t Piece::* before, int64_t total,
                int num_threads, Work work) {
    parallel_stretches(total, num_threads, [&](int64_t begin, int64_t end) {
        for (size_t i = 0; i < pieces.size(); ++i) {
            const int64_t first = pieces[i].*before;
            const int64_t last = i + 1 < pieces.size() ? pieces[i + 1].*before : total;
            const int64_t from = std::max(begin, first), to = std::min(end, last);
            if (from < to) work(pieces[i], from - first, to - first);
        }
    });
}

template <class T>
void add_pieces(const MutableMatrix& out, const Matrix& x, const std::vector<Piece>& pieces,
                float* low, int64_t ranks, int64_t blocks, int num_threads) {
    for_pieces(pieces, &Piece::ranks, ranks, num_threads,
               [&](const Piece& piece, int64_t begin, int64_t end) {
                   go_down<T>(low, piece, x, begin, end);
               });
    for_pieces(pieces, &Piece::blocks, blocks, num_threads,
               [&](const Piece& piece, int64_t begin, int64_t end) {
                   go_up<T>(out, piece, low, begin, end);
               });
}

}  // namespace

void Adapters::begin_step(std::vector<AdapterRows> groups) {
    groups_ = std::move(groups);
    group_of_.clear();
    for (size_t group = 0; group < groups_.size(); ++group) {
        for (const int64_t row : groups_[group].rows) {
            if (static_cast<size_t>(row) >= group_of_.size()) {
                group_of_.resize(static_cast<size_t>(row) + 1, -1);
            }
            group_of_[static_cast<size_t>(row)] = static_cast<int64_t>(group);
        }
    }
}

void Adapters::add(const MutableMatrix& out, const Matrix& x, int64_t layer, int num_threads) {
    uses_.clear();
    for (const AdapterRows& group : groups_) {
        const AdapterLayer* found = find(group.slot, layer);
        if (found == nullptr || found->parts.empty()) continue;
        const int64_t* rows = group.rows.data();
        uses_.push_back({found, rows, rows, static_cast<int64_t>(group.rows.size())});
    }
    add_uses(out, x, num_threads);
}

void Adapters::group_experts(const std::vector<ExpertRow>& rows) {
    struct Key {
        int64_t expert, group, place;
        bool operator<(const Key& other) const {
            return std::tie(expert, group, place) < std::tie(other.expert, other.group, other.place);
        }
    };
    std::vector<Key> keys;
    for (size_t place = 0; place < rows.size(); ++place) {
        const auto row = static_cast<size_t>(rows[place].row);
        const int64_t group = row < group_of_.size() ? group_of_[row] : -1;
        if (group >= 0) keys.push_back({rows[place].expert, group, static_cast<int64_t>(place)});
    }
    std::sort(keys.begin(), keys.end());
    expert_groups_.clear();
    from_.clear();
    to_.clear();
    for (size_t i = 0; i < keys.size(); ++i) {
        const auto& [expert, group, place] = keys[i];
        if (i == 0 || keys[i - 1].expert != expert || keys[i - 1].group != group) {
            const int64_t slot = groups_[static_cast<size_t>(group)].slot;
            expert_groups_.push_back({expert, slot, static_cast<int64_t>(i), 0});
        }
        ++expert_groups_.back().count;
        from_.push_back(rows[static_cast<size_t>(place)].row);
        to_.push_back(place);
    }
}

void Adapters::add_experts(const MutableMatrix& out, const Matrix& x, int64_t first,
                           bool is_of_step, int num_threads) {
    uses_.clear();
    for (const ExpertGroup& group : expert_groups_) {
        const AdapterLayer* found = find(group.slot, first + group.expert);
        if (found == nullptr || found->parts.empty()) continue;
        const int64_t* to = to_.data() + group.begin;
        uses_.push_back({found, is_of_step ? from_.data() + group.begin : to, to, group.count});
    }
    add_uses(out, x, num_threads);
}

void Adapters::add_uses(const MutableMatrix& out, const Matrix& x, int num_threads) {
    std::vector<Piece> pieces;
    Matrix inputs = x;
    Element element = Element::kFloat32;
    int64_t low = 0, ranks = 0, blocks = 0, products = 0;
    for (const AdapterUse& use : uses_) {
        for (const AdapterPart& part : use.layer->parts) {
            inputs.columns = use.layer->inputs;
            element = use.layer->element;
            pieces.push_back({&use, &part, low, ranks, blocks});
            low += use.count * part.rank;
            ranks += part.rank;
            blocks += blocks_of(part);
            products += use.count * part.rank * (use.layer->inputs + part.outputs);
        }
    }
    if (pieces.empty()) return;
    low_.resize(std::max(low_.size(), static_cast<size_t>(low)));
    const int threads = products < kAloneProducts ? 1 : num_threads;
    switch (element) {
        case Element::kFloat32:
            return add_pieces<float>(out, inputs, pieces, low_.data(), ranks, blocks, threads);
        case Element::kBfloat16:
            return add_pieces<Bfloat16>(out, inputs, pieces, low_.data(), ranks, blocks, threads);
        case Element::kFloat16:
            return add_pieces<Float16>(out, inputs, pieces, low_.data(), ranks, blocks, threads);
    }
}

}  // namespace quire
