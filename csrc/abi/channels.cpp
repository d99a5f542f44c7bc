// Checks of the arguments of recurrences whose channels read only themselves.
#include "abi/grouped.h"

namespace {

using namespace raglane;

// Operations of an RG-LRU for an element of a channel.
constexpr double rglru_operations = 60;

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
}
