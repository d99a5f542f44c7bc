// What the parts that are compiled once per instruction set share with the part that is compiled once: plain data.
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

// Sequences that follow each other, [begin, end), which one thread at a time walks through.
struct Group {
  int64_t begin, end;
  int64_t place;  // among all groups, in the order of the sequences
};

// A checked element-wise call, with what depends on the lengths alone. No sum reaches over the end of a group, so the
// groups depend on nothing else: not on the number of threads.
struct ElementwiseCall {
  const raglane_elementwise* layer;
  const Group* group;  // those with the most elements first
  int64_t groups;
  int64_t largest;  // elements of the first
  int64_t cache;    // bytes of a core's own cache
};

// What each instruction set provides. They return a raglane_status.
struct Kernels {
  int32_t (*forward)(const Call&);
  int32_t (*backward)(const Call&);
  int32_t (*elementwise_forward)(const ElementwiseCall&);
  int32_t (*elementwise_backward)(const ElementwiseCall&);
  int32_t (*apply)(int64_t dtype, int64_t function, const void* in, void* out, int64_t count);
};
namespace portable { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512bf16 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }

}  // namespace raglane
