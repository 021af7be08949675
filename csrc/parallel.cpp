#include "parallel.h"

namespace quire {

ParallelRegion parallel_region = nullptr;

}  // namespace quire
