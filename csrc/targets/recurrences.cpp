// The linear recurrences for one instruction set; those of bfloat16 alone use the loops of their family.
#if !defined(RAGLANE_TARGET)
#error "compiled once per instruction set"
#endif
#include "elementwise/channels.h"
#include "recurrence/attention_forward.h"
#include "recurrence/attention_products.h"
#include "recurrence/block_step.h"
#include "targets/targets.h"

#if !defined(RAGLANE_FAMILY)
namespace raglane::RAGLANE_TARGET {
namespace {

template <class Call, class Run> int32_t with_dtype(int64_t dtype, const Call& call, Run&& run) {
  switch (dtype) {
    case RAGLANE_FLOAT32: return run.template operator()<float>(call);
    case RAGLANE_FLOAT64: return run.template operator()<double>(call);
    case RAGLANE_BFLOAT16: return run.template operator()<bfloat16>(call);
  }
  return RAGLANE_BAD_ARGUMENT;
}

}  // namespace

int32_t scan(const SelectiveScan& call) {
  return with_dtype(call.call->dtype, call, []<class S>(const auto& c) { return SelectiveLoops<S>(c).forward(); });
}
int32_t scan_backward(const SelectiveScan& call) {
  return with_dtype(call.call->dtype, call, []<class S>(const auto& c) { return SelectiveLoops<S>(c).backward(); });
}
int32_t convolve(const GroupedCall<raglane_convolution>& call) {
  return with_dtype(call.call->dtype, call, []<class S>(const auto& c) { return ConvolutionLoops<S>(c).forward(); });
}
int32_t convolve_backward(const GroupedCall<raglane_convolution>& call) {
  return with_dtype(call.call->dtype, call, []<class S>(const auto& c) { return ConvolutionLoops<S>(c).backward(); });
}
int32_t accumulate(const GroupedCall<raglane_rglru>& call) {
  return with_dtype(call.call->dtype, call, []<class S>(const auto& c) { return RglruLoops<S>(c).forward(); });
}
int32_t accumulate_backward(const GroupedCall<raglane_rglru>& call) {
  return with_dtype(call.call->dtype, call, []<class S>(const auto& c) { return RglruLoops<S>(c).backward(); });
}
int32_t step_mamba(const raglane_mamba_step& step) {
  return step.dtype == RAGLANE_FLOAT64 ? MambaStep<double>(step).run() : MambaStep<float>(step).run();
}
int32_t step_attention(const raglane_attention_step& step) {
  return step.dtype == RAGLANE_FLOAT64 ? AttentionStep<double>(step).run() : AttentionStep<float>(step).run();
}
int32_t step_block(const raglane_block_step& step) {
  return step.dtype == RAGLANE_FLOAT64 ? BlockStep<double>(step).run() : BlockStep<float>(step).run();
}
int32_t attend(const LinearAttention& call) {
  return with_dtype(call.attention->dtype, call, []<class S>(const auto& c) { return AttentionForward<S>(c).run(); });
}
int32_t attend_backward(const LinearAttention& call) {
  return with_dtype(call.attention->dtype, call, []<class S>(const auto& c) { return AttentionBackward<S>(c).run(); });
}

}  // namespace raglane::RAGLANE_TARGET
#endif
