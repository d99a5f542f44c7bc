// The forward loop for one instruction set; see run.h.
#include "scan/forward.h"
#include "targets/run.h"

namespace raglane::RAGLANE_TARGET {
int32_t forward(const Call& call) { return run<ForwardScan>(call); }
int32_t pack(const Call& call) { return run<MatrixPacking>(call); }
}  // namespace raglane::RAGLANE_TARGET
