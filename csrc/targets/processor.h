// The instruction sets of this build and of this processor, and its caches.
#pragma once

#include "targets/targets.h"

namespace raglane {

// Of a number, null where there is none.
const char* isa_name(int64_t isa);

bool processor_has(int64_t isa);

// Loops of every dtype; else of bfloat16 alone.
bool has_all_dtypes(int64_t isa);

// The kernels for an instruction set and a dtype; a Failure where there are none here.
const Kernels& kernels_of(int64_t isa, int64_t dtype);

// The kernels of that instruction set for weights of int8, with the instruction that multiplies them where the processor
// has it: the results are bit-identical.
const ByteKernels& byte_kernels_of(int64_t isa);

// Bytes of a core's own cache.
int64_t cache_bytes();

}  // namespace raglane
