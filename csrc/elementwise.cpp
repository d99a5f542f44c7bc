// The element-wise loops for the instruction set that the build names; see kernels.h.
#include "elementwise_backward.h"
#include "elementwise_forward.h"
#include "kernels.h"

namespace raglane::RAGLANE_TARGET {
int32_t elementwise_forward(const ElementwiseCall& call) { return run<ElementwiseForward>(call); }
int32_t elementwise_pack(const ElementwiseCall& call) { return run<ElementwisePacking>(call); }
int32_t elementwise_backward(const ElementwiseCall& call) { return run<ElementwiseBackward>(call); }
}  // namespace raglane::RAGLANE_TARGET
