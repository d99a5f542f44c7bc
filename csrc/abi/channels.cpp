// Checks of the arguments of calls whose channels or heads read only themselves.
#include "abi/grouped.h"

namespace {

using namespace raglane;

// Operations of an RG-LRU for an element of a channel, and of a gated norm for a number.
constexpr double rglru_operations = 60, norm_operations = 40;

double check(const raglane_convolution& call, bool backward) {
  check_size("channels", call.channels);
  check_size("taps", call.taps);
  between("kept", call.kept, call.taps - 1, most_width);
  present("weight", call.weight);
  if (call.elements > 0) {
    present("x", call.x);
    if (!backward) present("output", call.output);
  }
  if (!backward && call.sequences > 0 && call.kept > 0) present("final", call.final);
  if (call.grad_initial && !call.initial) fail("initial must be there with grad_initial, got null");
  return (backward ? 4 : 2) * (double)call.channels * (double)call.taps;
}

double check(const raglane_rglru& call, bool backward) {
  check_size("channels", call.channels);
  present("entry_bias", call.entry_bias), present("recurrent_bias", call.recurrent_bias), present("rates", call.rates);
  if (call.elements > 0) {
    present("x", call.x), present("entry", call.entry), present("recurrent", call.recurrent);
    if (!backward) present("output", call.output);
    if (backward && call.elements >= border) present("borders", call.borders);
  }
  if (!backward && call.sequences > 0) present("final", call.final);
  return (backward ? 2 : 1) * rglru_operations * (double)call.channels;
}

void check(const raglane_gated_norm& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  if (call.dtype != RAGLANE_FLOAT32 && call.dtype != RAGLANE_FLOAT64)
    fail("dtype must be RAGLANE_FLOAT32 or RAGLANE_FLOAT64, got %lld", (long long)call.dtype);
  between("threads", call.threads, 1, most_threads);
  between("elements", call.elements, 0, most_rows);
  check_size("heads", call.heads);
  check_size("size", call.size);
  present("weight", call.weight);
  if (call.grad) present("grad_weight", call.grad_weight);
  if (call.elements == 0) return;
  present("y", call.y), present("gate", call.gate);
  if (!call.grad) return present("output", call.output);
  present("grad_y", call.grad_y), present("grad_gate", call.grad_gate);
}

template <class Call>
int32_t run(const Call* call, bool backward, GroupedKernel<Call> kernel, char* message, int64_t size) {
  return run_grouped(call, [&](const Call& mine) { return check(mine, backward); }, kernel, message, size);
}

}  // namespace

extern "C" {

int32_t raglane_convolve(const raglane_convolution* call, char* message, int64_t size) {
  return run(call, false, &Kernels::convolve, message, size);
}

int32_t raglane_convolve_backward(const raglane_convolution* call, char* message, int64_t size) {
  return run(call, true, &Kernels::convolve_backward, message, size);
}

int32_t raglane_accumulate(const raglane_rglru* call, char* message, int64_t size) {
  return run(call, false, &Kernels::accumulate, message, size);
}

int32_t raglane_accumulate_backward(const raglane_rglru* call, char* message, int64_t size) {
  return run(call, true, &Kernels::accumulate_backward, message, size);
}

int32_t raglane_gate_norm(const raglane_gated_norm* call, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("call", call);
    raglane_gated_norm mine = *call;
    check(mine);
    const double operations = norm_operations * (double)(mine.heads * mine.size);
    if (mine.flags == 0) mine.threads = useful_threads(mine.threads, operations * (double)mine.elements);
    return kernels_of(mine.isa, mine.dtype).gate_norm(mine);
  });
}
}
