// The backward loop for the instruction set that the build names, and its table of entries; see kernels.h.
#include "kernels.h"

namespace raglane::RAGLANE_TARGET {
int32_t forward(const Call& call);
int32_t elementwise_forward(const ElementwiseCall& call);
int32_t elementwise_backward(const ElementwiseCall& call);
int32_t backward(const Call& call) { return run<BackwardScan>(call); }
extern const Kernels kernels = {forward, backward, elementwise_forward, elementwise_backward, apply};
}  // namespace raglane::RAGLANE_TARGET
