// What the parts that are compiled once an instruction set share with the part that is compiled once: plain data.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "raglane.h"

namespace raglane {

// A checked call, with what depends on the lengths alone.
struct Call {
  const raglane_layer* layer;
  const int64_t* order;   // the sequences that are not empty, longest first
  int64_t ordered;        // how many
  int64_t longest;        // the largest length
  int64_t cache;          // bytes of a core's own cache
};

// What each instruction set provides. They return a raglane_status.
struct Kernels {
  int32_t (*forward)(const Call&);
  int32_t (*backward)(const Call&);
  int32_t (*apply)(int64_t dtype, int64_t function, const void* in, void* out, int64_t count);
};
namespace portable { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace raglane
