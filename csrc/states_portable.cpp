// The delta rule for any CPU: vectors of four, which compilers know everywhere.
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "states_kernels.h"

namespace quire {
namespace {

struct Isa {
    typedef float F __attribute__((vector_size(16)));
    static constexpr int kLanes = 4, kVectors = 2;
    static constexpr const char* kName = "portable";

    static inline F all(float value) { return F{value, value, value, value}; }
    static inline F load(const float* at) {
        F values;
        std::memcpy(&values, at, sizeof values);
        return values;
    }
    static inline void store(float* at, F values) { std::memcpy(at, &values, sizeof values); }
    static inline F fma(F a, F b, F c) { return a * b + c; }
};

}  // namespace
}  // namespace quire

#include "states_tiles.inc.h"

namespace quire {
const DeltaKernels kDeltaPortable = kKernels;
}
