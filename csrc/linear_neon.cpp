// Linear layers with what every 64-bit ARM CPU has.
#include "variants.h"

#ifdef QUIRE_ARM_VARIANTS
#define QUIRE_NEON_NAME "neon"
#include "linear_neon.inc.h"
#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearNeon = kKernels;
}
#endif
