// The loop of programs for one instruction set.
#include "simd/simd.h"
#if !defined(RAGLANE_FAMILY)  // no product of a program uses pairs, so a set with a family has no loop of its own
#include "program/program.h"
#endif
#include "abi/call.h"

namespace raglane::RAGLANE_TARGET {

#if !defined(RAGLANE_FAMILY)
template <class A> int32_t run_program(const ProgramCall& call) {
  ProgramScan<A> scan(call);
  if (!scan.reserve()) return RAGLANE_OUT_OF_MEMORY;
  on_threads((int)call.program->threads, [&](int thread, int threads) { scan.work(thread, threads); });
  return RAGLANE_OK;
}
int32_t program(const ProgramCall& call) {
  return call.program->dtype == RAGLANE_FLOAT64 ? run_program<double>(call) : run_program<float>(call);
}

// Count the bytes of packed weights, or pack them after the header.
template <class A> int32_t pack_program(const ProgramCall& call) {
  const Code& code = *call.code;
  Scratch<PackedWeight<A>> weights;
  if (!weights.reserve(code.weights, false)) return RAGLANE_OUT_OF_MEMORY;
  int64_t size = 0;
  for (int64_t w = 0; w < code.weights; w++) {
    weights.get()[w].place(code.weight[w], call.program->tensors[code.first_tensor[RAGLANE_LOCAL] + w]);
    size += weights.get()[w].size();
  }
  *call.packing.bytes = (int64_t)sizeof(PackedHeader) + size * (int64_t)sizeof(A);
  if (!call.packing.to) return RAGLANE_OK;
  place_weights(code, weights.get(), packed_weights<A>(call.packing.to, nullptr));
  pack_weights(code, weights.get(), 0, 1);
  return RAGLANE_OK;
}
int32_t program_pack(const ProgramCall& call) {
  return call.program->dtype == RAGLANE_FLOAT64 ? pack_program<double>(call) : pack_program<float>(call);
}
#else
int32_t program(const ProgramCall&) { return RAGLANE_BAD_ARGUMENT; }
int32_t program_pack(const ProgramCall&) { return RAGLANE_BAD_ARGUMENT; }
#endif

}  // namespace raglane::RAGLANE_TARGET
