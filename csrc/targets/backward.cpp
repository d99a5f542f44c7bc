// The backward loop, the gradients after it, and the table of entries, for one instruction set; see
// run.h.
#include "elementwise/gated_norm.h"
#include "gemm/call_gradients.h"
#include "scan/backward.h"
#include "scan/backward_rounds.h"
#include "targets/apply.h"
#include "targets/peak.h"
#include "targets/run.h"
#include "targets/targets.h"

// The gradients after the loop use no pairs, so they are the family's.
#if defined(RAGLANE_FAMILY)
namespace raglane::RAGLANE_FAMILY {
int32_t walk_and_gradients(const raglane_layer& layer, const Walk& walk);
int32_t backward_in_rounds(const Call& call);
int32_t outer(const raglane_outer& outer);
int32_t gate_norm(const raglane_gated_norm& norm);
int32_t convolve(const GroupedCall<raglane_convolution>& call);
int32_t convolve_backward(const GroupedCall<raglane_convolution>& call);
int32_t accumulate(const GroupedCall<raglane_rglru>& call);
int32_t accumulate_backward(const GroupedCall<raglane_rglru>& call);
int32_t scan(const SelectiveScan& call);
int32_t scan_backward(const SelectiveScan& call);
int32_t step_mamba(const raglane_mamba_step& step);
int32_t step_attention(const raglane_attention_step& step);
int32_t step_block(const raglane_block_step& step);
int32_t attend(const LinearAttention& call);
int32_t attend_backward(const LinearAttention& call);
}
#endif

namespace raglane::RAGLANE_TARGET {
#if defined(RAGLANE_FAMILY)
using RAGLANE_FAMILY::accumulate;
using RAGLANE_FAMILY::accumulate_backward;
using RAGLANE_FAMILY::attend;
using RAGLANE_FAMILY::attend_backward;
using RAGLANE_FAMILY::backward_in_rounds;
using RAGLANE_FAMILY::convolve;
using RAGLANE_FAMILY::convolve_backward;
using RAGLANE_FAMILY::gate_norm;
using RAGLANE_FAMILY::outer;
using RAGLANE_FAMILY::scan;
using RAGLANE_FAMILY::scan_backward;
using RAGLANE_FAMILY::step_attention;
using RAGLANE_FAMILY::step_block;
using RAGLANE_FAMILY::step_mamba;
using RAGLANE_FAMILY::walk_and_gradients;
#else
int32_t outer(const raglane_outer& outer) { return outer_products(outer); }
int32_t gate_norm(const raglane_gated_norm& norm) {
  return norm.dtype == RAGLANE_FLOAT64 ? GatedNorm<double>(norm).run() : GatedNorm<float>(norm).run();
}
int32_t walk_and_gradients(const raglane_layer& layer, const Walk& walk) { return with_gradients(layer, walk); }
int32_t backward_in_rounds(const Call& call) { return run<BackwardRounds>(call); }
#endif
#if !defined(RAGLANE_FAMILY)
int32_t convolve(const GroupedCall<raglane_convolution>& call);
int32_t convolve_backward(const GroupedCall<raglane_convolution>& call);
int32_t accumulate(const GroupedCall<raglane_rglru>& call);
int32_t accumulate_backward(const GroupedCall<raglane_rglru>& call);
int32_t scan(const SelectiveScan& call);
int32_t scan_backward(const SelectiveScan& call);
int32_t step_mamba(const raglane_mamba_step& step);
int32_t step_attention(const raglane_attention_step& step);
int32_t step_block(const raglane_block_step& step);
int32_t attend(const LinearAttention& call);
int32_t attend_backward(const LinearAttention& call);
#endif
int32_t forward(const Call& call);
int32_t elementwise_forward(const ElementwiseCall& call);
int32_t elementwise_backward(const ElementwiseCall& call);
int32_t pack(const Call& call);
int32_t elementwise_pack(const ElementwiseCall& call);
int32_t program(const ProgramCall& call);
int32_t program_pack(const ProgramCall& call);
int32_t backward(const Call& call) {
  return call.rounds ? backward_in_rounds(call) : walk_and_gradients(*call.layer, walk_of<Call, run<BackwardScan>>(call));
}
extern const Kernels kernels = {forward,          backward, elementwise_forward, elementwise_backward, pack,
                                elementwise_pack, program, program_pack, outer, gate_norm, scan, scan_backward,
                                convolve, convolve_backward, accumulate, accumulate_backward,
                                step_mamba, step_attention, step_block, attend, attend_backward, apply,
                                multiply_registers};
}  // namespace raglane::RAGLANE_TARGET
