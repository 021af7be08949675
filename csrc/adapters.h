// Adapters (LoRA, Hu et al. 2021, section 4.1): low-rank additions to linear layers, for rows that are
// grouped by adapter. Rows of no group cost nothing.
//
//   out[t, part] += scale (x[t] down[part]^T) up[part]        for each row t of an adapter
//
// Shape legend: T rows (tokens), K inputs, N outputs of a part, R rank of a part.
//
// A layer that merges modules (queries, keys and values) has a part for each adapted module. Each
// adapter has its own rank: nothing is padded. One thread computes each number, as a sum in a fixed
// order. So a row has the same bits alone and in any batch.
//
// Each expert of a mixture has layers of its own. Its rows are grouped by adapter, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "linear.h"

namespace quire {

// down: [R, K], up: [R, N], both of the layer's element. first: the part's first output.
struct AdapterPart {
    const void* down;
    const void* up;
    int64_t rank;
    int64_t first;
    int64_t outputs;
    float scale;
};

// The parts of one adapter in one layer; none where the adapter leaves the layer as it is.
struct AdapterLayer {
    Element element;
    int64_t inputs;
    std::vector<AdapterPart> parts;
};

// One adapter's layers. It never changes once it is in a slot.
class Adapter {
   public:
    explicit Adapter(int64_t num_layers) : layers_(static_cast<size_t>(num_layers)) {}

    // The memory of the parts must outlive their use.
    void set(int64_t layer, AdapterLayer adapted) {
        layers_.at(static_cast<size_t>(layer)) = std::move(adapted);
    }
    const AdapterLayer& layer(int64_t number) const { return layers_.at(static_cast<size_t>(number)); }

   private:
    std::vector<AdapterLayer> layers_;
};

// The rows of a step that use the adapter in a slot.
struct AdapterRows {
    int64_t slot;
    std::vector<int64_t> rows;
};

// Rows of a call that use one adapter's layer: `count` rows of x, and the rows of out that they add to.
struct AdapterUse {
    const AdapterLayer* layer;
    const int64_t* from;
    const int64_t* to;
    int64_t count;
};

// A row that an expert computes: the step's row that it comes from.
struct ExpertRow {
    int64_t expert, row;
};

// The adapters in a device's slots, and the rows of the current step that use them.
class Adapters {
   public:
    explicit Adapters(int64_t num_slots) : slots_(static_cast<size_t>(num_slots)) {}

    void put(int64_t slot, std::shared_ptr<const Adapter> adapter) {
        slots_.at(static_cast<size_t>(slot)) = std::move(adapter);
    }

    // Sets the groups of the steps from now on. A row is in at most one group.
    void begin_step(std::vector<AdapterRows> groups);
    bool is_idle() const { return groups_.empty(); }

    // Adds to the rows of all groups. out, x: float32 rows of the whole step.
    void add(const MutableMatrix& out, const Matrix& x, int64_t layer, int num_threads);

    // Groups the rows of one mixture by expert and adapter, for add_experts. rows: sorted by expert.
    void group_experts(const std::vector<ExpertRow>& rows);

    // Adds to the grouped rows; expert e has layer `first + e`. out: a row for each of the rows. x:
    // the same, or rows of the whole step.
    void add_experts(const MutableMatrix& out, const Matrix& x, int64_t first, bool is_of_step,
                     int num_threads);

   private:
    // A stretch of from_ and to_: rows of one expert and one group.
    struct ExpertGroup {
        int64_t expert, slot, begin, count;
    };

    const AdapterLayer* find(int64_t slot, int64_t layer) const {
        const auto& adapter = slots_.at(static_cast<size_t>(slot));
        return adapter == nullptr ? nullptr : &adapter->layer(layer);
    }
    void add_uses(const MutableMatrix& out, const Matrix& x, int num_threads);

    std::vector<std::shared_ptr<const Adapter>> slots_;
    std::vector<AdapterRows> groups_;
    std::vector<int64_t> group_of_;  // by row of the step, as far as the last one in a group; -1: none
    std::vector<ExpertGroup> expert_groups_;
    std::vector<int64_t> from_, to_;  // rows of the step, and of the mixture, by expert and group
    std::vector<AdapterUse> uses_;
    std::vector<float> low_;  // products of all groups with `down`, kept from one call to the next
};

}  // namespace quire
