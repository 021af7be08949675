// NEON: 32 registers of 4 floats. Included by the variants below their targets: QUIRE_BYTE_DOTS
// allows sdot, QUIRE_BFLOAT16_DOTS bfdot.
//
// A tile has 4 rows: with 5 or 6 the sums, the weights of two inputs and the activations no longer
// fit the registers.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "linear_formats.h"

namespace quire {
namespace {

struct Isa {
    using F = float32x4_t;
    using I = int32x4_t;

    static constexpr int64_t kLanes = 4, kTileRows = 4, kWideRows = 4;
    static constexpr bool kSplitsPairs = false;
    static constexpr int kVectors = 4;
    static constexpr int32_t kInt8Offset = 0;
    static constexpr const char* kName = QUIRE_NEON_NAME;

    static inline int8x16_t bytes(I words) { return vreinterpretq_s8_s32(words); }
    static inline uint16x4_t halves(const void* at) {
        return vld1_u16(static_cast<const uint16_t*>(at));
    }

    static inline F zero() { return vdupq_n_f32(0.0f); }
    static inline F all(float value) { return vdupq_n_f32(value); }
    static inline I all(int32_t value) { return vdupq_n_s32(value); }
    static inline I all_word(const void* at) {
        int32_t word;
        __builtin_memcpy(&word, at, sizeof word);
        return all(word);
    }
    static inline F load(const void* at) { return vld1q_f32(static_cast<const float*>(at)); }
    static inline void store(float* at, F values) { vst1q_f32(at, values); }
    static inline I load_words(const void* at) {
        return vld1q_s32(static_cast<const int32_t*>(at));
    }
    static inline void store_words(void* at, I words) { vst1q_s32(static_cast<int32_t*>(at), words); }
    static inline F load_halves(const void* at) {
        return vcvt_f32_f16(vreinterpret_f16_u16(halves(at)));
    }
    static inline F widen_bfloat16(const void* at) {
        return vreinterpretq_f32_u32(vshll_n_u16(halves(at), 16));
    }
    // Pairs of e4m3 as float16 of the same exponent bits, widened: 2^8 too small.
    static inline void load_float8(const uint8_t* at, F& even, F& odd) {
        const int16x4_t pairs = vld1_s16(reinterpret_cast<const int16_t*>(at));
        const int16x4_t mask = vdup_n_s16(static_cast<int16_t>(0xBF80));
        const int16x4_t low = vshr_n_s16(vshl_n_s16(pairs, 8), 1);
        even = vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(low, mask)));
        odd = vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(vshr_n_s16(pairs, 1), mask)));
    }
    template <int kBits>
    static inline I shift_right(I words) {
        return vshrq_n_s32(words, kBits);
    }
    template <int kBits>
    static inline I shift_left(I words) {
        return vshlq_n_s32(words, kBits);
    }
    static inline I load_bytes(const uint8_t* at) {
        uint32_t word;
        __builtin_memcpy(&word, at, sizeof word);
        const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(word));
        return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
    }
    static inline F as_floats(I words) { return vreinterpretq_f32_s32(words); }
    static inline F minus(F values) { return vnegq_f32(values); }
    static inline I look_up(const uint8_t* table, I codes) {
        return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s32(codes)));
    }
    // Multiplies the low halves of bytes by their own multiple, and adds the start, for
    // MultiplesWeight.
    struct Multiples {
        uint8x16_t own, starts;
    };
    // codes: in the lowest 4 bits of each word.
    static inline Multiples multiples(I codes) {
        static constexpr uint8_t kRow[16] = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
        const uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_s32(codes), vld1q_u8(kRow));
        const uint8x16_t own = vaddq_u8(vandq_u8(bytes, vdupq_n_u8(7)), vdupq_n_u8(1));
        const uint8x16_t is_above = vtstq_u8(bytes, vdupq_n_u8(kAboveBit));
        const uint8x16_t below = vsubq_u8(vdupq_n_u8(kMultipleBias), vshlq_n_u8(own, 3));
        return {own, vaddq_u8(below, vandq_u8(is_above, own))};
    }
    static inline I multiplied(I words, const Multiples& multiples) {
        const uint8x16_t integers = vreinterpretq_u8_s32(low_nibbles(words));
        return vreinterpretq_s32_u8(vmlaq_u8(multiples.starts, integers, multiples.own));
    }
    static inline F low_halves(I words) { return vreinterpretq_f32_s32(vshlq_n_s32(words, 16)); }
    static inline F high_halves(I words) { return vreinterpretq_f32_s32(words & all(-65536)); }
    static inline I low_nibbles(I words) { return words & all(0x0F0F0F0F); }
    static inline I high_nibbles(I words) {
        return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(words), 4));
    }
    static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static inline F times(F a, F b) { return vmulq_f32(a, b); }
    static inline F to_float(I values) { return vcvtq_f32_s32(values); }
#ifdef QUIRE_BYTE_DOTS
    static inline I dot_bytes(I sum, I w, I x) { return vdotq_s32(sum, bytes(w), bytes(x)); }
#else
    // Two products are added in 16 bits: at most 2 * 127 * 127, which fits.
    static inline I dot_bytes(I sum, I w, I x) {
        const int16x8_t low = vmull_s8(vget_low_s8(bytes(w)), vget_low_s8(bytes(x)));
        const int16x8_t high = vmull_high_s8(bytes(w), bytes(x));
        return vpadalq_s16(sum, vpaddq_s16(low, high));
    }
#endif
    static inline I dot_nibbles(I sum, I w, I x) { return dot_bytes(sum, w, x); }
#ifdef QUIRE_BFLOAT16_DOTS
    static inline F dot_bfloat16(F sum, I w, I x) {
        return vbfdotq_f32(sum, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(x));
    }
#endif
};

}  // namespace
}  // namespace quire
