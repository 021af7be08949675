// Attention with NEON, as every 64-bit ARM CPU has it: 32 registers of 4 floats.
#include "variants.h"

#ifdef QUIRE_ARM_VARIANTS
#include "attention_kernels.h"
#include "elements.h"

#include <arm_neon.h>
#include <cstring>
#include <type_traits>
#include <utility>

namespace quire {
namespace {

struct Isa {
    using F = float32x4_t;
    using I = int32x4_t;
    static constexpr int kLanes = 4, kTileRows = 5, kWideRows = 5;
    static constexpr const char* kName = "neon";

    static inline F all(float value) { return vdupq_n_f32(value); }
    static inline F load(const void* at) { return vld1q_f32(static_cast<const float*>(at)); }
    static inline void store(float* at, F values) { vst1q_f32(at, values); }
    static inline I load_words(const void* at) {
        return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(at)));
    }
    static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static inline F max(F a, F b) { return vmaxnmq_f32(a, b); }
    static inline float largest(F x) { return vmaxnmvq_f32(x); }
    static inline float total(F x) {
        const float32x2_t two = vadd_f32(vget_low_f32(x), vget_high_f32(x));
        return vget_lane_f32(vadd_f32(two, vdup_lane_f32(two, 1)), 0);
    }
    static inline I where_at_least(F x, F limit, I value) {
        return vandq_s32(vreinterpretq_s32_u32(vcgeq_f32(x, limit)), value);
    }
    static inline F float16_of(I words) {
        return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(words)));
    }
    static inline F load_bfloat16(const void* at) {
        return vreinterpretq_f32_u32(vshll_n_u16(halves(at), 16));
    }
    static inline F load_float16(const void* at) {
        return vcvt_f32_f16(vreinterpret_f16_u16(halves(at)));
    }
    static inline I load_bytes(const void* at) {
        uint32_t bytes;
        std::memcpy(&bytes, at, sizeof bytes);
        const int16x8_t widened = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes)));
        return vmovl_s16(vget_low_s16(widened));
    }

   private:
    // The bytes of a head need not be aligned.
    static inline uint16x4_t halves(const void* at) {
        return vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t*>(at)));
    }
    static inline int64x2_t pairs(I words) { return vreinterpretq_s64_s32(words); }
    static inline I words(int64x2_t pairs) { return vreinterpretq_s32_s64(pairs); }
};

}  // namespace
}  // namespace quire

#include "attention_tiles.inc.h"

namespace quire {
const AttentionKernels kAttentionNeon = kKernels;
}
#endif
