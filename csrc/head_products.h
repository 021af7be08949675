// Products of each head with its own weight: out[t][n] = x[t][n] W[n]^T, as the projections into and
// out of a latent space are (DeepSeek-V2, section 2.1).
// Shape legend: T rows (tokens), N heads, K inputs and O outputs of a head.
#pragma once

#include <cstdint>

#include "linear.h"

namespace quire {

// out[T, O] = x[T, K] W^T of one head; both are columns of rows that hold all heads.
struct HeadProduct {
    MutableMatrix out;
    PackedWeight weight;
    Matrix x;
};

// Computes N products of one shape. A row has the same bits in any batch.
void head_products(const HeadProduct* heads, int64_t count, int num_threads);

}  // namespace quire
