#include "row_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "elements.h"
#include "exponential.h"
#include "parallel.h"

namespace quire {
namespace {

#define QUIRE_INLINE inline __attribute__((always_inline))

constexpr int64_t kSums = 16;

inline float merged(const float* sums) {
    float total = 0;
    for (int64_t i = 0; i < kSums; ++i) total += sums[i];
    return total;
}

// The sum of (x - shift)^2.
QUIRE_VECTOR
float sum_of_squares(const float* x, int64_t size, float shift) {
    float sums[kSums] = {};
    const int64_t whole = size / kSums * kSums;
    for (int64_t i = 0; i < whole; i += kSums) {
        for (int64_t j = 0; j < kSums; ++j) {
            const float value = x[i + j] - shift;
            sums[j] += value * value;
        }
    }
    for (int64_t i = whole; i < size; ++i) sums[i - whole] += (x[i] - shift) * (x[i] - shift);
    return merged(sums);
}

QUIRE_VECTOR
float sum_of(const float* x, int64_t size) {
    float sums[kSums] = {};
    const int64_t whole = size / kSums * kSums;
    for (int64_t i = 0; i < whole; i += kSums) {
        for (int64_t j = 0; j < kSums; ++j) sums[j] += x[i + j];
    }
    for (int64_t i = whole; i < size; ++i) sums[i - whole] += x[i];
    return merged(sums);
}

QUIRE_VECTOR
void scale_all(float* out, const float* x, const float* weight, float factor, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

QUIRE_VECTOR
void turn(float* out, const float* x, const float* factors, int64_t half) {
    const float *cosines = factors, *sines = factors + 3 * half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        out[i] = a * cosines[i] - b * sines[i];
        out[i + half] = b * cosines[i] + a * sines[i];
    }
}

// erf by Abramowitz and Stegun 7.1.26, absolute error 2e-7.
inline float erf_of(float x) {
    const float size = float_of(bits_of(x) & 0x7FFFFFFF);
    const float t = 1.0f / (1.0f + 0.3275911f * size);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float result = 1.0f - p * t * exp_negative(-size * size);
    return float_of(bits_of(result) | (bits_of(x) & static_cast<int32_t>(0x80000000u)));
}

inline float gelu_of(float x) { return 0.5f * x * (1.0f + erf_of(x * 0.70710678f)); }

// tanh(u) = (1 - e^-2|u|) / (1 + e^-2|u|), with u's sign.
inline float gelu_tanh_of(float x) {
    const float u = 0.79788456f * (x + 0.044715f * x * x * x);
    const float e = exp_negative(-2.0f * float_of(bits_of(u) & 0x7FFFFFFF));
    const float sign = bits_of(u) < 0 ? -1.0f : 1.0f;
    return 0.5f * x * (1.0f + sign * (1.0f - e) / (1.0f + e));
}

// x / (1 + e^-x), with an exponential whose argument is never positive.
inline float silu_of(float x) {
    const float e = exp_negative(-float_of(bits_of(x) & 0x7FFFFFFF));
    return x * ((bits_of(x) < 0 ? e : 1.0f) / (1.0f + e));
}

QUIRE_VECTOR
void gate_all(float* out, const float* x, const float* gate, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * silu_of(gate[i]);
}

// Inlined into what is compiled for several instruction sets: templates are not.
template <int kWidth>
QUIRE_INLINE void convolve_all(float* __restrict out, const float* const* taps,
                               const float* weight, int64_t stride, int64_t size) {
    const float *x[kWidth], *factor[kWidth];
    for (int w = 0; w < kWidth; ++w) x[w] = taps[w], factor[w] = weight + w * stride;
    for (int64_t i = 0; i < size; ++i) {
        float sum = 0;
        for (int w = 0; w < kWidth; ++w) sum += factor[w][i] * x[w][i];
        out[i] = silu_of(sum);
    }
}

template <int kLines>
QUIRE_INLINE void split_all(float* __restrict lines, int64_t stride, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        for (int l = 0; l < kLines; ++l) lines[l * stride + i] = x[i * kLines + l];
    }
}

template <int kLines>
QUIRE_INLINE void join_all(float* __restrict out, const float* const* lines, int64_t size) {
    const float* x[kLines];
    for (int l = 0; l < kLines; ++l) x[l] = lines[l];
    for (int64_t i = 0; i < size; ++i) {
        for (int l = 0; l < kLines; ++l) out[i * kLines + l] = x[l][i];
    }
}

template <class T>
QUIRE_VECTOR void widen_all(float* out, const T* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = widen(from[i]);
}

}  // namespace

void rms_norm_row(float* out, const float* x, const float* weight, int64_t heads, int64_t size,
                  float eps) {
    for (int64_t head = 0; head < heads; ++head, x += size, out += size, weight += size) {
        const float mean = sum_of_squares(x, size, 0.0f) / static_cast<float>(size);
        scale_all(out, x, weight, 1.0f / std::sqrt(mean + eps), size);
    }
}

float square_sum_row(const float* x, int64_t size) { return sum_of_squares(x, size, 0.0f); }

void rms_norm_row_by_sum(float* out, const float* x, const float* weight, float mean, int64_t size,
                         float eps) {
    scale_all(out, x, weight, 1.0f / std::sqrt(mean + eps), size);
}

void add_rms_norm_row(float* out, float* total, const float* x, const float* y,
                      const float* weight, int64_t size, float eps) {
    add_row(total, x, y, size);
    rms_norm_row(out, total, weight, 1, size, eps);
}

void gated_norm_row(float* out, const float* x, const float* gate, const float* weight,
                    int64_t heads, int64_t size, float eps) {
    for (int64_t head = 0; head < heads; ++head, x += size, gate += size, out += size) {
        rms_norm_row(out, x, weight, 1, size, eps);
        gate_all(out, out, gate, size);
    }
}

QUIRE_VECTOR
void unit_row(float* out, const float* x, float length, int64_t size, float eps) {
    const float factor = length / std::sqrt(sum_of_squares(x, size, 0.0f) + eps);
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor;
}

QUIRE_VECTOR
float dot_row(const float* x, const float* y, int64_t size) {
    float sums[kSums] = {};
    const int64_t whole = size / kSums * kSums;
    for (int64_t i = 0; i < whole; i += kSums) {
        for (int64_t j = 0; j < kSums; ++j) sums[j] += x[i + j] * y[i + j];
    }
    for (int64_t i = whole; i < size; ++i) sums[i - whole] += x[i] * y[i];
    return merged(sums);
}

QUIRE_VECTOR
void layer_norm_row(float* out, const float* x, const float* weight, const float* bias,
                    int64_t size, float eps) {
    const auto count = static_cast<float>(size);
    const float mean = sum_of(x, size) / count;
    const float factor = 1.0f / std::sqrt(sum_of_squares(x, size, mean) / count + eps);
    if (weight == nullptr) {
        for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * factor;
    } else if (bias == nullptr) {
        for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * factor * weight[i];
    } else {
        for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * factor * weight[i] + bias[i];
    }
}

void rotary_factors(float* factors, const int64_t* positions, int64_t stride,
                    const double* frequencies, int64_t axes, int64_t size, double scale) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        double angle = 0, frequency = 0;
        for (int64_t axis = 0; axis < axes; ++axis) {
            const double own = frequencies[axis * half + i];
            angle += static_cast<double>(positions[axis * stride]) * own;
            frequency += own;
        }
        const double own = frequency == 0 ? 1 : scale;  // what is not turned is not scaled
        const double cosine = std::cos(angle) * own, sine = std::sin(angle) * own;
        factors[i] = factors[half + i] = static_cast<float>(cosine);
        factors[2 * half + i] = static_cast<float>(-sine);
        factors[3 * half + i] = static_cast<float>(sine);
    }
}

void rotary_row(float* out, const float* x, const float* factors, int64_t heads, int64_t size) {
    for (int64_t head = 0; head < heads; ++head, x += size, out += size) {
        turn(out, x, factors, size / 2);
    }
}

QUIRE_VECTOR
void silu_mul_row(float* out, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = silu_of(x[i]) * x[size + i];
}

QUIRE_VECTOR
void convolve_row(float* out, const float* const* taps, const float* weight, int64_t stride,
                  int64_t width, int64_t size) {
    switch (width) {
        case 2: return convolve_all<2>(out, taps, weight, stride, size);
        case 3: return convolve_all<3>(out, taps, weight, stride, size);
        case 4: return convolve_all<4>(out, taps, weight, stride, size);
        default:
            for (int64_t i = 0; i < size; ++i) {
                float sum = 0;
                for (int64_t w = 0; w < width; ++w) sum += weight[w * stride + i] * taps[w][i];
                out[i] = silu_of(sum);
            }
    }
}

QUIRE_VECTOR
void split_lines(float* lines, int64_t stride, const float* x, int64_t count, int64_t size) {
    switch (count) {
        case 1: return split_all<1>(lines, stride, x, size);
        case 2: return split_all<2>(lines, stride, x, size);
        case 3: return split_all<3>(lines, stride, x, size);
        default:
            for (int64_t i = 0; i < size * count; ++i) lines[i % count * stride + i / count] = x[i];
    }
}

QUIRE_VECTOR
void join_lines(float* out, const float* const* lines, int64_t count, int64_t size) {
    switch (count) {
        case 1: return join_all<1>(out, lines, size);
        case 2: return join_all<2>(out, lines, size);
        case 3: return join_all<3>(out, lines, size);
        default:
            for (int64_t i = 0; i < size * count; ++i) out[i] = lines[i % count][i / count];
    }
}

QUIRE_VECTOR
void gelu_row(float* out, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = gelu_of(x[i]);
}

QUIRE_VECTOR
void gelu_tanh_row(float* out, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = gelu_tanh_of(x[i]);
}

QUIRE_VECTOR
void gelu_mul_row(float* out, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = gelu_of(x[i]) * x[size + i];
}

QUIRE_VECTOR
void gelu_tanh_mul_row(float* out, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = gelu_tanh_of(x[i]) * x[size + i];
}

// 1 / (1 + e^-x).
inline float sigmoid_of(float x) {
    const float e = exp_negative(-float_of(bits_of(x) & 0x7FFFFFFF));
    return (bits_of(x) < 0 ? e : 1.0f) / (1.0f + e);
}

QUIRE_VECTOR
void clamped_gate_row(float* out, const float* x, float alpha, float limit, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        const float gate = x[i] > limit ? limit : x[i];  // NaN stays
        const float up = x[size + i] > limit ? limit : x[size + i] < -limit ? -limit : x[size + i];
        out[i] = gate * sigmoid_of(alpha * gate) * (up + 1.0f);
    }
}

QUIRE_VECTOR
void gated_add_row(float* out, const float* x, const float* y, float gate, int64_t size) {
    const float factor = sigmoid_of(gate);
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] + factor * y[i];
}

QUIRE_VECTOR
void sigmoid_mul_row(float* out, const float* x, const float* gate, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * sigmoid_of(gate[i]);
}

void scale_by_top_row(float* out, const float* x, const float* logits, int64_t count, int64_t size) {
    scale_row(out, x, sigmoid_of(*std::max_element(logits, logits + count)), size);
}

QUIRE_VECTOR
void add_scaled_row(float* out, const float* x, float factor, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] += factor * x[i];
}

void copy_row(float* out, const float* x, int64_t size) {
    std::memcpy(out, x, static_cast<size_t>(size) * sizeof(float));
}

QUIRE_VECTOR
void scale_row(float* out, const float* x, float factor, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor;
}

QUIRE_VECTOR
void relu_row(float* out, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] < 0.0f ? 0.0f : x[i];  // NaN stays
}

QUIRE_VECTOR
void add_row(float* out, const float* x, const float* y, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] + y[i];
}

void look_up_row(float* out, Element element, const void* table, int64_t id, int64_t size) {
    const int64_t at = id * size;
    switch (element) {
        case Element::kFloat32: return widen_all(out, static_cast<const float*>(table) + at, size);
        case Element::kBfloat16:
            return widen_all(out, static_cast<const Bfloat16*>(table) + at, size);
        default: return widen_all(out, static_cast<const Float16*>(table) + at, size);
    }
}

}  // namespace quire
