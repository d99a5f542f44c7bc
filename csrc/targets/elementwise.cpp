// The element-wise loops for one instruction set; see run.h.
#include "elementwise/backward.h"
#include "elementwise/forward.h"
#include "targets/run.h"

// See backward.cpp, where it is compiled for calls of both kinds.
#if defined(RAGLANE_FAMILY)
namespace raglane::RAGLANE_FAMILY {
int32_t walk_and_gradients(const raglane_layer& layer, const Walk& walk);
}
#endif

namespace raglane::RAGLANE_TARGET {
#if defined(RAGLANE_FAMILY)
using RAGLANE_FAMILY::walk_and_gradients;
#else
int32_t walk_and_gradients(const raglane_layer& layer, const Walk& walk);
#endif
int32_t elementwise_forward(const ElementwiseCall& call) { return run<ElementwiseForward>(call); }
int32_t elementwise_pack(const ElementwiseCall& call) { return run<ElementwisePacking>(call); }
int32_t elementwise_backward(const ElementwiseCall& call) {
  return walk_and_gradients(*call.layer, walk_of<ElementwiseCall, run<ElementwiseBackward>>(call));
}
}  // namespace raglane::RAGLANE_TARGET
