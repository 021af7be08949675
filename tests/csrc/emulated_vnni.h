// vpdpbusd on 256 bits one number at a time, as Intel's manual describes it: for CPUs without AVX-VNNI,
// and to check the instruction against.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire {

// sum: 8 words of 32 bits; w: 32 unsigned bytes; x: 32 signed bytes. Sums wrap around.
inline void emulated_vpdpbusd(void* sum, const void* w, const void* x) {
    const auto* unsigned_bytes = static_cast<const uint8_t*>(w);
    const auto* signed_bytes = static_cast<const int8_t*>(x);
    uint32_t words[8];
    std::memcpy(words, sum, sizeof words);
    for (int i = 0; i < 32; ++i) {
        words[i / 4] += static_cast<uint32_t>(int32_t{unsigned_bytes[i]} * signed_bytes[i]);
    }
    std::memcpy(sum, words, sizeof words);
}

}  // namespace quire
