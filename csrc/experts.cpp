#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "parallel.h"
#include "row_ops.h"

namespace quire {
namespace {

constexpr int64_t kPiecesPerThread = 8;
constexpr int64_t kFewRows = 8;  // up to so many, reading an expert takes longer than multiplying
constexpr int64_t kAloneElements = 16 * 1024;

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The pairs of this rank's experts, sorted by expert and then by row.
struct Order {
    std::vector<int32_t> ids;      // [P], by pair
    std::vector<float> weights;    // [P], by pair
    std::vector<int64_t> begins;   // [E + 1]: of each expert's places
    std::vector<int64_t> pairs;    // [P], by place
    std::vector<int64_t> places;   // [P], by pair; -1: its expert is elsewhere
    std::vector<int32_t> experts;  // [P], by place

    int64_t count() const { return begins.back(); }
};

Order order_of(const Experts& experts, const Matrix& logits, int num_threads) {
    const auto count = static_cast<int64_t>(experts.experts.size());
    const int64_t chosen = experts.num_chosen, pairs = logits.rows * chosen, all = experts.all;
    const auto size = static_cast<size_t>(pairs);
    Order order{std::vector<int32_t>(size), std::vector<float>(size),
                std::vector<int64_t>(static_cast<size_t>(count + 1)), std::vector<int64_t>(size),
                std::vector<int64_t>(size, -1), std::vector<int32_t>(size)};
    const int threads = logits.rows * all < kAloneElements ? 1 : num_threads;
    parallel_for(logits.rows, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> scratch;
        for (int64_t r = begin; r < end; ++r) {
            const auto* own = static_cast<const float*>(logits.data) + r * logits.stride;
            int32_t* ids = &order.ids[r * chosen];
            float* weights = &order.weights[r * chosen];
            if (experts.routing.num_groups == 0) {
                choose_experts(ids, weights, own, all, chosen, experts.normalises);
            } else {
                choose_in_groups(ids, weights, own, all, chosen, experts.normalises,
                                 experts.routing, scratch);
            }
        }
    });
    const auto place_of = [&](int32_t id) { return id - experts.first; };
    const auto is_here = [&](int32_t id) { return place_of(id) >= 0 && place_of(id) < count; };
    for (const int32_t id : order.ids) {
        if (is_here(id)) ++order.begins[place_of(id) + 1];
    }
    for (int64_t e = 0; e < count; ++e) order.begins[e + 1] += order.begins[e];
    std::vector<int64_t> next(order.begins.begin(), order.begins.end() - 1);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        if (!is_here(order.ids[pair])) continue;
        const auto expert = static_cast<int32_t>(place_of(order.ids[pair]));
        const int64_t place = next[expert]++;
        order.pairs[place] = pair;
        order.places[pair] = place;
        order.experts[place] = expert;
    }
    return order;
}

std::vector<ExpertRow> rows_of(const Order& order, int64_t chosen) {
    std::vector<ExpertRow> rows(static_cast<size_t>(order.count()));
    for (size_t place = 0; place < rows.size(); ++place) {
        rows[place] = {order.experts[place], order.pairs[place] / chosen};
    }
    return rows;
}

// Operands of all pairs, by place: rows of `stride` bytes, and of int8 their scales and sums, of which
// there are at most `groups`.
struct Operands {
    int64_t stride, groups;
    uint8_t* values;
    float* scales;
    int32_t* sums;

    // `rows` of an expert's rows from `row` on. first: the expert's first place. Its own scales follow
    // one another, of which other experts may have more.
    MutableOperand of(const PackedWeight& weight, int64_t first, int64_t row, int64_t rows) const {
        const int64_t own = weight.rounds_activations() ? weight.groups() : 0;
        const int64_t at = first * groups + row * own;
        return {rows, stride, values + (first + row) * stride, scales + at, sums + at};
    }
};

int64_t bytes_of(const PackedWeight& weight) {
    const Matrix row{Element::kFloat32, 1, weight.inputs, weight.inputs, nullptr};
    return linear_kernels(weight.variant).operand_bytes(weight, row);
}

// Space for the operands of a weight of each expert. least: bytes that rows have at least.
Operands space_for(const Experts& experts, PackedWeight Expert::* weight, int64_t min_bytes) {
    Operands found{min_bytes, 0, nullptr, nullptr, nullptr};
    for (const Expert& expert : experts.experts) {
        found.stride = std::max(found.stride, rounded(bytes_of(expert.*weight)));
        if ((expert.*weight).rounds_activations()) {
            found.groups = std::max(found.groups, (expert.*weight).groups());
        }
    }
    return found;
}

void prepare_row(const MutableOperand& operand, const PackedWeight& weight, const float* x) {
    if (bytes_of(weight) == 0) {
        std::memcpy(operand.values, x, static_cast<size_t>(weight.inputs) * sizeof(float));
        return;
    }
    const Matrix row{Element::kFloat32, 1, weight.inputs, weight.inputs, x};
    linear_kernels(weight.variant).prepare(operand, weight, row, 0, 1);
}

// Calls work(place) for all of them.
template <class Work>
void for_places(int64_t count, int64_t width, int num_threads, Work work) {
    const int threads = count * width < kAloneElements ? 1 : num_threads;
    parallel_for(count, threads, [&](int64_t begin, int64_t end) {
        for (int64_t place = begin; place < end; ++place) work(place);
    });
}

struct Piece {
    int64_t expert, begin, end;  // panels
};

// Cuts the weights of the experts that have rows so that threads share the work evenly.
std::vector<Piece> pieces_of(const Experts& experts, PackedWeight Expert::* weight,
                             const Order& order, int num_threads) {
    const auto count = static_cast<int64_t>(experts.experts.size());
    const auto work_of = [&](int64_t e) {
        const int64_t rows = order.begins[e + 1] - order.begins[e];
        return rows == 0 ? 0 : std::max(rows, kFewRows);
    };
    int64_t total = 0;
    for (int64_t e = 0; e < count; ++e) total += work_of(e);
    std::vector<Piece> pieces;
    for (int64_t e = 0; e < count; ++e) {
        if (work_of(e) == 0) continue;
        const PackedWeight& own = experts.experts[e].*weight;
        const int64_t panel = linear_kernels(own.variant).panel;
        const int64_t panels = (own.outputs + panel - 1) / panel;
        const int64_t num_pieces = (kPiecesPerThread * num_threads * work_of(e) + total - 1) / total;
        const int64_t parts = std::min(panels, num_pieces);
        for (int64_t i = 0; i < parts; ++i) {
            pieces.push_back({e, i * panels / parts, (i + 1) * panels / parts});
        }
    }
    return pieces;
}

// out[place] = the place's operand times its expert's weight; rows of `stride` floats.
void multiply_places(float* out, int64_t stride, const Experts& experts,
                     PackedWeight Expert::* weight, const float* Expert::* bias,
                     const Operands& operands, const Order& order, int num_threads) {
    const std::vector<Piece> pieces = pieces_of(experts, weight, order, num_threads);
    const auto multiply_piece = [&](const Piece& piece) {
        const Expert& expert = experts.experts[piece.expert];
        const PackedWeight& own = expert.*weight;
        const int64_t first = order.begins[piece.expert];
        const int64_t rows = order.begins[piece.expert + 1] - first;
        const MutableMatrix results{Element::kFloat32, rows, own.outputs, stride,
                                    out + first * stride};
        linear_kernels(own.variant)
            .multiply(results, expert.*bias, own, operands.of(own, first, 0, rows), piece.begin,
                      piece.end);
    };
    const auto count = static_cast<int64_t>(pieces.size());
    parallel_stretches(count, num_threads, [&](int64_t begin, int64_t end) {
        std::for_each(pieces.begin() + begin, pieces.begin() + end, multiply_piece);
    });
}

// Writes the indices of the largest numbers, in falling order. NaN loses to every number; it is
// chosen only when no number is left.
void choose_largest(int32_t* chosen, int64_t num_chosen, const float* numbers, int64_t count) {
    const auto is_taken = [&](int64_t index, int64_t end) {
        return std::find(chosen, chosen + end, static_cast<int32_t>(index)) != chosen + end;
    };
    for (int64_t i = 0; i < num_chosen; ++i) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; ++e) {
            const bool is_better = best < 0 || numbers[e] > numbers[best] ||
                                   (std::isnan(numbers[best]) && !std::isnan(numbers[e]));
            if (is_better && !is_taken(e, i)) best = e;
        }
        chosen[i] = static_cast<int32_t>(best);
    }
}

// Writes the scores of all experts. Returns 0, or NaN if one of them is NaN.
float score_experts(float* scores, const float* logits, int64_t num_experts, bool is_sigmoid) {
    float largest = logits[0], total = 0, sum = 0;
    for (int64_t e = 0; e < num_experts; ++e) largest = std::max(largest, logits[e]);
    for (int64_t e = 0; e < num_experts; ++e) total += std::exp(logits[e] - largest);
    for (int64_t e = 0; e < num_experts; ++e) {
        scores[e] = is_sigmoid ? 1.0f / (1.0f + std::exp(-logits[e]))
                               : std::exp(logits[e] - largest) / total;
        sum += scores[e];
    }
    return sum * 0.0f;
}

// Sets the ranks of the experts outside of the best groups to -inf.
void leave_groups(float* ranks, int64_t num_experts, const Routing& routing) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int64_t groups = routing.num_groups, size = num_experts / groups;
    std::vector<float> scores(static_cast<size_t>(groups));
    std::vector<int32_t> chosen(static_cast<size_t>(routing.num_chosen_groups));
    for (int64_t g = 0; g < groups; ++g) {
        float first = lowest, second = lowest;
        for (const float* each = ranks + g * size; each < ranks + (g + 1) * size; ++each) {
            second = std::max(second, std::min(first, *each));
            first = std::max(first, *each);
        }
        scores[g] = routing.is_sigmoid ? first + second : first;
    }
    choose_largest(chosen.data(), routing.num_chosen_groups, scores.data(), groups);
    for (int64_t g = 0; g < groups; ++g) {
        const bool is_left = std::find(chosen.begin(), chosen.end(), g) == chosen.end();
        if (is_left) std::fill(ranks + g * size, ranks + (g + 1) * size, lowest);
    }
}

}  // namespace

uint8_t* ExpertMemory::reserve(int64_t num_bytes) {
    if (num_bytes + 64 > capacity_) {
        capacity_ = num_bytes + 64;
        memory_.reset(new uint8_t[static_cast<size_t>(capacity_)]);
    }
    return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64;
}

void choose_in_groups(int32_t* ids, float* weights, const float* logits, int64_t num_experts,
                      int64_t num_chosen, bool normalises, const Routing& routing,
                      std::vector<float>& scratch) {
    scratch.resize(static_cast<size_t>(2 * num_experts));
    float *scores = scratch.data(), *ranks = scores + num_experts, sum = 0;
    const float shown = score_experts(scores, logits, num_experts, routing.is_sigmoid);
    for (int64_t e = 0; e < num_experts; ++e) {
        ranks[e] = routing.bias == nullptr ? scores[e] : scores[e] + routing.bias[e];
    }
    if (routing.num_groups > 1) leave_groups(ranks, num_experts, routing);
    choose_largest(ids, num_chosen, ranks, num_experts);
    for (int64_t i = 0; i < num_chosen; ++i) sum += scores[ids[i]];
    const float divisor = (normalises ? sum + 1e-20f : 1.0f) + shown;  // NaN shows in all weights
    for (int64_t i = 0; i < num_chosen; ++i) {
        weights[i] = scores[ids[i]] / divisor * routing.scale;
    }
}

void choose_experts(int32_t* ids, float* weights, const float* logits, int64_t num_experts,
                    int64_t num_chosen, bool normalises) {
    float largest = -std::numeric_limits<float>::infinity(), total = 0, sum = 0;
    for (int64_t e = 0; e < num_experts; ++e) largest = std::max(largest, logits[e]);
    for (int64_t e = 0; e < num_experts; ++e) total += std::exp(logits[e] - largest);
    choose_largest(ids, num_chosen, logits, num_experts);
    for (int64_t i = 0; i < num_chosen; ++i) {
        weights[i] = std::exp(logits[ids[i]] - largest);
        sum += weights[i];
    }
    const float divisor = (normalises ? sum : total) + total * 0.0f;  // NaN shows in all weights
    for (int64_t i = 0; i < num_chosen; ++i) weights[i] /= divisor;
}

int64_t run_experts(const MutableMatrix& out, const Experts& experts, const Matrix& x,
                    const Matrix& logits, ExpertMemory& memory, Adapters* adapters,
                    int num_threads) {
    const int64_t size = x.columns, inner = experts.experts.front().down.inputs;
    const int64_t chosen = experts.num_chosen;
    if (x.rows == 0) return 0;
    const Order order = order_of(experts, logits, num_threads);
    const int64_t pairs = order.count();
    const bool is_adapted = adapters != nullptr && experts.adapted_gate_up >= 0;
    if (is_adapted) adapters->group_experts(rows_of(order, chosen));
    const auto bytes = [](int64_t floats) { return static_cast<int64_t>(sizeof(float)) * floats; };
    Operands first = space_for(experts, &Expert::gate_up, rounded(bytes(size)));
    Operands second = space_for(experts, &Expert::down, rounded(bytes(inner)));
    // Rows of the first operands are overwritten by the second product's results.
    const int64_t gate_up_bytes = rounded(bytes(2 * inner));
    uint8_t* free = memory.reserve(
        pairs * (first.stride + gate_up_bytes + second.stride + 8 * (first.groups + second.groups)));
    const auto take = [&](int64_t row_bytes) {
        uint8_t* begin = free;
        free += pairs * row_bytes;
        return begin;
    };
    first.values = take(first.stride);
    auto* gate_up = reinterpret_cast<float*>(take(gate_up_bytes));
    second.values = take(second.stride);
    for (Operands* each : {&first, &second}) {
        each->scales = reinterpret_cast<float*>(take(4 * each->groups));
        each->sums = reinterpret_cast<int32_t*>(take(4 * each->groups));
    }
    const auto* rows = static_cast<const float*>(x.data);
    const auto prepare = [&](const Operands& operands, PackedWeight Expert::* weight, int64_t place,
                             const float* row) {
        const int64_t expert = order.experts[place], begin = order.begins[expert];
        const PackedWeight& own = experts.experts[expert].*weight;
        prepare_row(operands.of(own, begin, place - begin, 1), own, row);
    };
    for_places(pairs, size, num_threads, [&](int64_t place) {
        prepare(first, &Expert::gate_up, place, rows + order.pairs[place] / chosen * x.stride);
    });
    const int64_t width = gate_up_bytes / bytes(1), out_width = first.stride / bytes(1);
    multiply_places(gate_up, width, experts, &Expert::gate_up, &Expert::gate_up_bias, first, order,
                    num_threads);
    const auto places = [&](float* data, int64_t columns, int64_t stride) {
        return MutableMatrix{Element::kFloat32, pairs, columns, stride, data};
    };
    if (is_adapted) {
        adapters->add_experts(places(gate_up, 2 * inner, width), x, experts.adapted_gate_up, true,
                              num_threads);
    }
    for_places(pairs, 2 * inner, num_threads, [&](int64_t place) {
        float* both = gate_up + place * width;
        if (experts.limit > 0) {
            clamped_gate_row(both, both, experts.alpha, experts.limit, inner);
        } else {
            silu_mul_row(both, both, inner);
        }
        prepare(second, &Expert::down, place, both);
    });
    auto* parts = reinterpret_cast<float*>(first.values);
    multiply_places(parts, out_width, experts, &Expert::down, &Expert::down_bias, second, order,
                    num_threads);
    if (is_adapted) {
        adapters->add_experts(places(parts, size, out_width), places(gate_up, inner, width),
                              experts.adapted_down, false, num_threads);
    }
    for_places(x.rows, chosen * size, num_threads, [&](int64_t r) {
        float* total = static_cast<float*>(out.data) + r * out.stride;
        std::fill(total, total + size, 0.0f);
        for (int64_t pair = r * chosen; pair < (r + 1) * chosen; ++pair) {
            if (order.places[pair] < 0) continue;
            const float* part = parts + order.places[pair] * out_width;
            add_scaled_row(total, part, order.weights[pair], size);
        }
    });
    return pairs;
}

}  // namespace quire
