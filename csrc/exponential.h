// exp for arguments that are not positive, as arithmetic that compilers can vectorise.
#pragma once

#include <algorithm>
#include <cstdint>

#include "row.h"

namespace quire {

// exp(x) for x <= 0, relative error below 2e-7: 2^n * p(r) with |r| <= ln(2) / 2. The limit at -87 is
// taken on the bits, because comparisons of floats would not vectorise.
inline float exp_negative(float x) {
    x = -float_of(std::min(bits_of(x) & 0x7FFFFFFF, 0x42AE0000));
    const int32_t n = static_cast<int32_t>(x * 1.44269504f - 0.5f);
    const float whole = static_cast<float>(n);
    const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * float_of((n + 127) << 23);
}

}  // namespace quire
