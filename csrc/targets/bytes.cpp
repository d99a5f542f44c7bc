// The forward loop with int8 weights, for one instruction set; see run.h.
#include "scan/forward.h"
#include "targets/run.h"
#include "targets/targets.h"

namespace raglane::RAGLANE_TARGET {
namespace {
int32_t forward_in_bytes(const Call& call) { return run_cell<ForwardScan, quantised>(call); }
int32_t pack_in_bytes(const Call& call) { return run_cell<MatrixPacking, quantised>(call); }
}  // namespace
extern const ByteKernels byte_kernels = {forward_in_bytes, pack_in_bytes};
}  // namespace raglane::RAGLANE_TARGET
