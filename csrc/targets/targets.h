// The table of instruction sets. A set is a line here and a file of operations in simd/.
#pragma once

#include <stdint.h>

#include "abi/call.h"

// TARGET(name, family, loops, bytes, flags, detected), numbered from 0; a better set follows those that it improves
// on.
//   name      of the namespace, of the file in simd/, and in Python
//   family    the set that it extends, including its flags and detection
//   loops     1: of every dtype, or only of bfloat16 if `bytes` is 0: then the family has the others.
//             0: callers cannot choose the set; its family, and sets that extend this, use its int8 loops if the
//             processor supports it, of several the last. Such sets follow all others.
//   bytes     1: the loops of int8 weights
//   flags     for the compiler. CMakeLists.txt reads them here, and defines RAGLANE_BUILT_name as 1 or 0.
//   detected  the processor supports it; see processor.cpp
#define RAGLANE_TARGETS(TARGET)                                                                                        \
  TARGET(portable, portable, 1, 1, "", true)                                                                           \
  TARGET(avx2, portable, 1, 1, "-mavx2 -mfma -mprfchw", RAGLANE_CPU("avx2") && RAGLANE_CPU("fma"))                     \
  TARGET(avx512, portable, 1, 1, "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mprfchw -mprefer-vector-width=512", \
         RAGLANE_CPU("avx512f") && RAGLANE_CPU("avx512bw") && RAGLANE_CPU("avx512dq") && RAGLANE_CPU("avx512vl") &&    \
             RAGLANE_CPU("fma"))                                                                                       \
  TARGET(avx512bf16, avx512, 1, 0, "-mavx512bf16", cpu_bit(1, EAX, 5))                                                 \
  TARGET(amx, avx512, 1, 0, "-mamx-tile -mamx-bf16",                                                                   \
         cpu_bit(1, EAX, 5) && cpu_bit(0, EDX, 22) && cpu_bit(0, EDX, 24) && tiles_permitted())                        \
  TARGET(avx2vnni, avx2, 0, 1, "-mavxvnni", cpu_bit(1, EAX, 4))                                                        \
  TARGET(avx512vnni, avx512, 0, 1, "-mavx512vnni", cpu_bit(0, ECX, 11))                                                \
  TARGET(amxint8, amx, 0, 1, "-mavx512vnni -mamx-int8", cpu_bit(0, ECX, 11) && cpu_bit(0, EDX, 25))

// A value, or {} if the condition is 0: RAGLANE_BUILT_name, `loops` or `bytes`.
#define RAGLANE_IF(condition, value) RAGLANE_IF_(condition, value)
#define RAGLANE_IF_(condition, value) RAGLANE_IF_##condition(value)
#define RAGLANE_IF_0(value) {}
#define RAGLANE_IF_1(value) value

namespace raglane {

// The loops of an instruction set. They return a raglane_status.
struct Kernels {
  int32_t (*forward)(const Call&);
  int32_t (*backward)(const Call&);
  int32_t (*elementwise_forward)(const ElementwiseCall&);
  int32_t (*elementwise_backward)(const ElementwiseCall&);
  int32_t (*pack)(const Call&);
  int32_t (*elementwise_pack)(const ElementwiseCall&);
  int32_t (*program)(const ProgramCall&);
  int32_t (*program_pack)(const ProgramCall&);
  int32_t (*outer)(const raglane_outer&);
  int32_t (*gate_norm)(const raglane_gated_norm&);
  int32_t (*scan)(const SelectiveScan&);
  int32_t (*scan_backward)(const SelectiveScan&);
  int32_t (*convolve)(const GroupedCall<raglane_convolution>&);
  int32_t (*convolve_backward)(const GroupedCall<raglane_convolution>&);
  int32_t (*accumulate)(const GroupedCall<raglane_rglru>&);
  int32_t (*accumulate_backward)(const GroupedCall<raglane_rglru>&);
  int32_t (*step_mamba)(const raglane_mamba_step&);
  int32_t (*step_attention)(const raglane_attention_step&);
  int32_t (*step_block)(const raglane_block_step&);
  int32_t (*attend)(const LinearAttention&);
  int32_t (*attend_backward)(const LinearAttention&);
  void (*apply)(int64_t dtype, int64_t function, const void* in, const void* factor, void* out, int64_t count);
  int64_t (*multiply_registers)(int64_t dtype, int64_t rounds);  // returns operations
};
// The same for int8 weights, only for inference.
struct ByteKernels {
  int32_t (*forward)(const Call&);
  int32_t (*pack)(const Call&);
};

#define RAGLANE_DECLARE(name, ...) \
  namespace name { extern const Kernels kernels; extern const ByteKernels byte_kernels; }
RAGLANE_TARGETS(RAGLANE_DECLARE)
#undef RAGLANE_DECLARE

}  // namespace raglane
