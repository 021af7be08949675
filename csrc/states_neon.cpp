// The delta rule with NEON, as every 64-bit ARM CPU has it: 32 registers of 4 floats.
#include "variants.h"

#ifdef QUIRE_ARM_VARIANTS
#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "elements.h"
#include "states_kernels.h"

namespace quire {
namespace {

struct Isa {
    using F = float32x4_t;
    static constexpr int kLanes = 4, kVectors = 4;
    static constexpr const char* kName = "neon";

    static inline F all(float value) { return vdupq_n_f32(value); }
    static inline F load(const float* at) { return vld1q_f32(at); }
    static inline void store(float* at, F values) { vst1q_f32(at, values); }
    static inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
};

}  // namespace
}  // namespace quire

#include "states_tiles.inc.h"

namespace quire {
const DeltaKernels kDeltaNeon = kKernels;
}
#endif
