// A model's forward pass as a list of instructions. It is traced once (ops/trace/tracer.py) and run
// by one call per step, like a graph on a GPU.
//
// Instructions are grouped in phases. There are two kinds. In the first, all instructions work row
// by row (a row is a token), so each thread takes its rows through all of them. The second is a
// single matrix product or attention (or similar), or the products of all heads. It divides its
// work among threads itself.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "huge_floats.h"
#include "linear.h"
#include "shared_group.h"
#include "states.h"

namespace quire {

// Instructions. A comment lists an instruction's views, then the other fields that it reads.
enum class Kind : int {
    kEmbedding,     // out; table, element, size, input, first, count: zeros outside of these
    kPackedRows,    // out; packed, first, count: rows of a packed table, by the ids
    kRotaryFactors, // out; frequencies: [axes, E], size, scale, count: axes of the positions
    kRmsNorm,       // out, x; weight, heads, size, eps
    kAddRmsNorm,    // out, total, x, y; weight, size, eps
    kLayerNorm,     // out, x; weight, bias (the bias or both may be null), size, eps
    kRotary,        // out, x, factors; heads, size
    kSiluMul,       // out, x; size: of out
    kGeluMul,
    kGeluTanhMul,
    kScale,         // out, x; size, scale
    kGelu,          // out, x; size
    kGeluTanh,
    kRelu,
    kAdd,           // out, x, y; size
    kStore,         // k, v; layer: into its blocks; of latent vectors both are the vectors
    kPrepare,       // operand, x; packed, stride: activations as the product reads them
    kMultiply,      // out, operand; packed, stride, bias (or null)
    kGatedAdd,      // out, x, y, gate; size
    kExperts,       // out, x, logits; layer: the number of its experts
    kAttend,        // out, q; layer, scale, soft_cap (or 0), weight: the heads' sinks (or null),
                    // size: the elements of a latent vector that are its value
    kConvolve,      // out, x; layer, weight: [W, C], heads: W, size: C
    kDeltaRule,     // out, qkv, gates; layer, delta, weight: rates, bias: shifts
    kGatedNorm,     // out, x, gate; weight: of all heads, heads, size, eps
    kSigmoidMul,    // out, x, gate; size
    kAllReduce,     // out, the same; group: whole rows
    kSquareSum,     // out: one number, x; size
    kRmsNormBySum,  // out, x, sum of squares; weight, size, eps, scale: 1 / how many were summed
    // The next two: tokens with an id below 0 use row -1 - id of a float32 table; others keep x.
    kPlace,         // out, x; table, size, first: the first column, count: columns of the table
    kAddFeatures,   // the same, where the row is added to x
    // out = x (1 + scale log(1 + periods)), of the whole periods up to the token's end; count: tokens
    // of a period.
    kScaleByPosition,  // out, x; size, count, scale
    kScaleByTop,       // out, x, logits; size, count: x sigmoid(the largest of `count` logits)
    kHeadProduct,   // out, x: columns of one head; packed. The heads of a product are one phase.
    kCopyHeads,     // out, x; heads, size: numbers of a head, which begin `count` apart in out
    kAdapt,         // out, x; layer: the adapters' number of the linear layer that made out of x
};

// kSegments: which of two texts a token is of, as its id says it (ops/elementwise.py): the id itself
// stands in the bits below.
enum class Input : int { kIds, kPositions, kSegments };
constexpr int kSegmentBit = 30;

// Some columns of a buffer, from `offset` on.
struct View {
    int64_t buffer;
    int64_t offset;
};

struct Instruction {
    Kind kind;
    std::array<View, 4> views;
    int64_t heads;
    int64_t size;    // of a row, or of one of its heads
    int64_t stride;  // bytes between the rows of an operand
    int64_t layer;
    int64_t first;   // of a table's rows the number, and how many it has
    int64_t count;
    Input input;
    Element element;  // of the table
    const void* table;
    const double* frequencies;
    const float* weight;
    const float* bias;
    double scale;
    float soft_cap;
    float eps;
    DeltaHeads delta;
    PackedWeight packed;
    SharedGroup* group;
};

// Keys and values of a layer, or its states, and which of the step's cache groups they belong to.
struct LayerCache {
    size_t group;
    KvLayer kv;
    StateLayer states;
};

// A cache group's part of a step. slots: [T], where new keys and values go. A group of states has the
// last alone.
struct GroupStep {
    const AttentionPlan* plan;
    const int64_t* slots;
    const StatePlan* states;
};

// Memory [count, stride] for the inputs of layers with states, one row per token. A row holds the
// inputs of each convolution, then the delta rule's strengths and times, in the order of the
// instructions.
struct KeptInputs {
    float* data;
    int64_t stride;
    const int64_t* tokens;
    int64_t count;
};

// A step: T rows. ids: [T]; positions: [axes, T]; outside: what the first buffers are, of which 0 is the
// result.
struct ProgramStep {
    int64_t rows;
    const int64_t* ids;
    const int64_t* positions;
    std::vector<GroupStep> groups;
    std::vector<float*> outside;
    KeptInputs kept;
};

// Buffers hold float32 [T, width]. The first are the step's own memory (`outside`), the others places
// in one arena: buffer b begins at column `places[b]` times T.
class Program {
   public:
    Program(std::vector<int64_t> widths, std::vector<int64_t> places, int64_t arena_width,
            int attention_variant);

    void add_layer(size_t group, const KvLayer& kv) { layers_.push_back({group, kv, {}}); }
    void add_state_layer(size_t group, const StateLayer& states) {
        layers_.push_back({group, {}, states});
    }
    // Adapters outlive the program.
    void use_adapters(Adapters* adapters) { adapters_ = adapters; }
    void add_experts(Experts experts) { experts_.push_back(std::move(experts)); }
    void add(const Instruction& instruction, bool begins_phase);
    void run(ProgramStep step, int num_threads);

    // Measure how long each phase takes from now on, or no longer; what was measured is forgotten.
    void time_phases(bool on);
    const std::vector<double>& phase_seconds() const { return phase_seconds_; }  // added up

    // The number of (row, expert) pairs that this rank's experts computed.
    int64_t expert_pairs() const { return expert_pairs_; }  // from any thread

   private:
    struct Phase {
        size_t begin, end;
        int64_t width;  // floats that its instructions write for a row
        std::vector<int64_t> results;  // buffers that it uses row by row, written otherwise before
        size_t next_product;  // the instruction after the phase that multiplies; 0: none
    };

    float* row(const View& view, int64_t row) const;
    int64_t input(Input input, int64_t row) const;
    const float* encoded(const Instruction& instruction, int64_t row) const;
    MutableOperand operand(const Instruction& instruction) const;
    MutableMatrix matrix(const View& view, int64_t columns) const;
    HeadRows heads(const View& view) const;
    void run_phase(const Phase& phase, int num_threads);
    void run_states(const Instruction& instruction, int num_threads);
    void run_heads(const Phase& phase, int num_threads);
    void keep(const View& view, int64_t width);
    void run_row_phase(const Phase& phase, int num_threads);
    void take_over(int64_t buffer, int64_t begin, int64_t end);
    void run_rows(const Instruction& instruction, int64_t begin, int64_t end);
    void run_row(const Instruction& i, int64_t r);
    void reserve(int64_t rows);

    std::vector<int64_t> widths_, places_;
    int64_t arena_width_;
    int attention_variant_;
    std::vector<LayerCache> layers_;
    std::vector<Experts> experts_;
    Adapters* adapters_ = nullptr;
    ExpertMemory expert_memory_;
    std::atomic<int64_t> expert_pairs_ = 0;
    std::vector<Instruction> instructions_;
    std::vector<Phase> phases_;
    std::vector<bool> are_results_;  // of the buffers: whether a kind with phases of its own writes it
    std::vector<double> phase_seconds_;  // empty unless they are measured
    ProgramStep step_{};
    HugeFloats arena_;
    int64_t capacity_ = 0;  // rows that the arena has room for
};

}  // namespace quire
