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
#else
int32_t program(const ProgramCall&) { return RAGLANE_BAD_ARGUMENT; }
#endif

}  // namespace raglane::RAGLANE_TARGET
