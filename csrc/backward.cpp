// The backward loop, and what follows it, for the instruction set that the build names, and its table of entries; see
// kernels.h.
#include "apply.h"
#include "kernels.h"
#include "layer_gradients.h"
#include "scan_backward.h"

namespace raglane::RAGLANE_TARGET {
int32_t forward(const Call& call);
int32_t elementwise_forward(const ElementwiseCall& call);
int32_t elementwise_backward(const ElementwiseCall& call);
int32_t pack(const Call& call);
int32_t elementwise_pack(const ElementwiseCall& call);
int32_t backward(const Call& call) { return walk_and_gradients(call, run<BackwardScan, Call>); }
extern const Kernels kernels = {forward,          backward, elementwise_forward, elementwise_backward, pack,
                                elementwise_pack, apply};
}  // namespace raglane::RAGLANE_TARGET
