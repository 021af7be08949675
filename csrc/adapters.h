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
#pragma once

#include <cstddef>
#include <cstdint>
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

// The rows of a step that use the adapter in a slot.
struct AdapterRows {
    int64_t slot;
    std::vector<int64_t> rows;
};

// The adapters in a device's slots, and the rows of the current step that use them.
class Adapters {
   public:
    Adapters(int64_t num_slots, int64_t num_layers)
        : num_layers_(num_layers), layers_(static_cast<size_t>(num_slots * num_layers)) {}

    // The memory of the parts must outlive their use.
    void set(int64_t slot, int64_t layer, AdapterLayer adapter) { at(slot, layer) = std::move(adapter); }
    void clear(int64_t slot) {
        for (int64_t layer = 0; layer < num_layers_; ++layer) at(slot, layer) = {};
    }

    // Sets the groups of the steps from now on. A row is in at most one group.
    void begin_step(std::vector<AdapterRows> groups) { groups_ = std::move(groups); }
    bool is_idle() const { return groups_.empty(); }

    // Adds to the rows of all groups. out, x: float32 rows of the whole step.
    void add(const MutableMatrix& out, const Matrix& x, int64_t layer, int num_threads);

   private:
    AdapterLayer& at(int64_t slot, int64_t layer) {
        return layers_.at(static_cast<size_t>(slot * num_layers_ + layer));
    }

    int64_t num_layers_;
    std::vector<AdapterLayer> layers_;  // by slot, then by layer
    std::vector<AdapterRows> groups_;
    std::vector<float> low_;  // products of all groups with `down`, kept from one call to the next
};

}  // namespace quire
