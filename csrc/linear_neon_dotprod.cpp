// Linear layers with NEON and sdot, which adds 16 products of signed bytes to 4 sums.
#include "variants.h"

#ifdef QUIRE_ARM_VARIANTS
#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"

#ifndef __clang__  // which takes the target from the command line (CMakeLists.txt)
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define QUIRE_BYTE_DOTS
#define QUIRE_NEON_NAME "neon_dotprod"
#include "linear_neon.inc.h"
#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearNeonDotprod = kKernels;
}
#endif
