// The element-wise loops for one instruction set; see run.h.
#include "elementwise/backward.h"
#include "elementwise/forward.h"
#include "gemm/call_gradients.h"
#include "targets/run.h"

// The gradients after the loop use no pairs, so they are the family's.
#if defined(RAGLANE_FAMILY)
namespace raglane::RAGLANE_FAMILY {
int32_t walk_and_gradients(const ElementwiseCall& call, int32_t (*walk)(const ElementwiseCall&));
}
#endif

namespace raglane::RAGLANE_TARGET {
#if defined(RAGLANE_FAMILY)
using RAGLANE_FAMILY::walk_and_gradients;
#else
int32_t walk_and_gradients(const ElementwiseCall& call, int32_t (*walk)(const ElementwiseCall&)) {
  return with_gradients(call, walk);
}
#endif
int32_t elementwise_forward(const ElementwiseCall& call) { return run<ElementwiseForward>(call); }
int32_t elementwise_pack(const ElementwiseCall& call) { return run<ElementwisePacking>(call); }
int32_t elementwise_backward(const ElementwiseCall& call) {
  return walk_and_gradients(call, run<ElementwiseBackward, ElementwiseCall>);
}
}  // namespace raglane::RAGLANE_TARGET
