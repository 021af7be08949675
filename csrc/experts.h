// The experts of a mixture: routing of rows to experts, and the weighted sum of their outputs.
// Shape legend: T rows (tokens), E experts, C experts of a row, P = T C pairs of a row and an
// expert, D inputs and outputs, F feed-forward dim of an expert.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "adapters.h"
#include "linear.h"

namespace quire {

// down(silu(gate(x)) * up(x)), gate and up in one weight. Biases may be null.
struct Expert {
    PackedWeight gate_up;  // [2 F, D]
    PackedWeight down;     // [D, F]
    const float* gate_up_bias;
    const float* down_bias;
};

// How DeepSeek's mixtures choose (src/quire/spec/deepseek/routing.py). num_groups: 0 for the largest logits
// instead, without groups. bias: by expert, added to scores for the choice only; may be null.
struct Routing {
    int64_t num_groups;
    int64_t num_chosen_groups;
    bool is_sigmoid;  // whether scores are sigmoids of the logits, or their softmax
    float scale;      // of the weights
    const float* bias;
};

// experts: those from `first` on, of all that rows are sent to; what others make of a row is zero here.
// limit: of a clamped gate, gate sigmoid(alpha gate) (up + 1), in the place of silu; 0 if there is none.
struct Experts {
    std::vector<Expert> experts;
    int64_t first;
    int64_t all;
    int64_t num_chosen;
    bool normalises;  // whether the weights of the chosen add up to 1
    float alpha;
    float limit;
    Routing routing;
    // Numbers of the first expert's layers among the adapted ones; -1: adapters leave them as they are.
    int64_t adapted_gate_up;
    int64_t adapted_down;
};

// Memory that products pass to each other, kept from one step to the next.
class ExpertMemory {
   public:
    uint8_t* reserve(int64_t num_bytes);

   private:
    std::unique_ptr<uint8_t[]> memory_;
    int64_t capacity_ = 0;
};

// Chooses the experts with the C largest of a row's logits [E], in falling order; ties go to the
// lower expert. The weights are probabilities among all experts or, with `normalises`, among the
// chosen ones.
void choose_experts(int32_t* ids, float* weights, const float* logits, int64_t num_experts,
                    int64_t num_chosen, bool normalises);

// Chooses the best groups of a row's experts, and then the C best experts in them, in falling order;
// ties go to the lower one. scratch: memory that calls share.
void choose_in_groups(int32_t* ids, float* weights, const float* logits, int64_t num_experts,
                      int64_t num_chosen, bool normalises, const Routing& routing,
                      std::vector<float>& scratch);

// out[T, D] of x[T, D] and the router's logits[T, E]; all float32. A row's sum is made in the order of
// its ids, so it has the same bits alone and in any batch. adapters: null if no row uses one. Returns
// how many pairs there were here.
int64_t run_experts(const MutableMatrix& out, const Experts& experts, const Matrix& x,
                    const Matrix& logits, ExpertMemory& memory, Adapters* adapters,
                    int num_threads);

}  // namespace quire
