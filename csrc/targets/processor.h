// The instruction sets of this build and processor, and its caches.
#pragma once

#include "targets/targets.h"

namespace raglane {

// The name of a number, null if there is none.
const char* isa_name(int64_t isa);

bool processor_has(int64_t isa);

// True if a set has loops of every dtype, false if only of bfloat16.
bool has_all_dtypes(int64_t isa);

// The kernels for an instruction set and a dtype; throws a Failure if there are none.
const Kernels& kernels_of(int64_t isa, int64_t dtype);

// The kernels of that instruction set for int8 weights, with its int8 instruction if the
// processor supports one: the results are bit-identical.
const ByteKernels& byte_kernels_of(int64_t isa);

// Bytes of a core's own cache.
int64_t cache_bytes();

}  // namespace raglane
