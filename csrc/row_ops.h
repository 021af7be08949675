// Operations on single rows between a step's matrix products. All values are float32; x, y and out
// point to one row (token) each. Sums use 16 lanes, merged in a fixed order, so a row's result has
// the same bits wherever it is computed.
#pragma once

#include <cstdint>

#include "linear.h"

namespace quire {

// out = x / sqrt(mean(x^2) + eps) * weight, for `heads` heads of `size` elements; weight: [heads, size].
void rms_norm_row(float* out, const float* x, const float* weight, int64_t heads, int64_t size,
                  float eps);

// The two halves of that where ranks have parts of x: what they sum, and the norm by the mean of all.
float square_sum_row(const float* x, int64_t size);
void rms_norm_row_by_sum(float* out, const float* x, const float* weight, float mean, int64_t size,
                         float eps);

// total = x + y, then out = rms_norm(total).
void add_rms_norm_row(float* out, float* total, const float* x, const float* y,
                      const float* weight, int64_t size, float eps);

// out = rms_norm(x) * silu(gate), head by head; weight: [size], the same for all heads.
void gated_norm_row(float* out, const float* x, const float* gate, const float* weight,
                    int64_t heads, int64_t size, float eps);

// out = length * x / sqrt(sum(x^2) + eps).
void unit_row(float* out, const float* x, float length, int64_t size, float eps);

float dot_row(const float* x, const float* y, int64_t size);

// Weight and bias may be null, or the bias alone.
void layer_norm_row(float* out, const float* x, const float* weight, const float* bias,
                    int64_t size, float eps);

// Computes factors[2 H] = (cos, cos, -sin, sin) * scale of the angles. An angle is the sum over
// axes of positions[a * stride] * frequencies[a, H / 2], with at most one term that is not 0.
void rotary_factors(float* factors, const int64_t* positions, int64_t stride,
                    const double* frequencies, int64_t axes, int64_t size, double scale);

// The two halves of each of the heads, turned by the factors.
void rotary_row(float* out, const float* x, const float* factors, int64_t heads, int64_t size);

// out[F] = silu(x[0, F)) * x[F, 2 F).
void silu_mul_row(float* out, const float* x, int64_t size);

// The same with gelu, exact and by tanh.
void gelu_mul_row(float* out, const float* x, int64_t size);
void gelu_tanh_mul_row(float* out, const float* x, int64_t size);

// Does the same with gpt-oss' gate: gate sigmoid(alpha gate) (up + 1). `limit` clamps gate from
// above, and up from both sides. out may be x.
void clamped_gate_row(float* out, const float* x, float alpha, float limit, int64_t size);

// out = silu(sum over w of weight[w] * taps[w]); `stride` between the weights' lines. out is none of
// the taps.
void convolve_row(float* out, const float* const* taps, const float* weight, int64_t stride,
                  int64_t width, int64_t size);

// `count` lines of `size` numbers from [size, count], `stride` apart, and from lines back to that.
void split_lines(float* lines, int64_t stride, const float* x, int64_t count, int64_t size);
void join_lines(float* out, const float* const* lines, int64_t count, int64_t size);

// out = x * sigmoid(gate), with a gate for each number.
void sigmoid_mul_row(float* out, const float* x, const float* gate, int64_t size);

// out = x * sigmoid(the largest of `count` logits).
void scale_by_top_row(float* out, const float* x, const float* logits, int64_t count, int64_t size);

// out = x + sigmoid(gate) * y, and out += factor * x.
void gated_add_row(float* out, const float* x, const float* y, float gate, int64_t size);
void add_scaled_row(float* out, const float* x, float factor, int64_t size);

void copy_row(float* out, const float* x, int64_t size);
void scale_row(float* out, const float* x, float factor, int64_t size);
void gelu_row(float* out, const float* x, int64_t size);
void gelu_tanh_row(float* out, const float* x, int64_t size);
void relu_row(float* out, const float* x, int64_t size);
void add_row(float* out, const float* x, const float* y, int64_t size);

// Row `id` of a table [V, size] of any element type.
void look_up_row(float* out, Element element, const void* table, int64_t id, int64_t size);

}  // namespace quire
