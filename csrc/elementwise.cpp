// The element-wise loops for the instruction set that the build names: every cell and dtype.
#include "cells/indrnn.h"
#include "cells/mingru.h"
#include "cells/minlstm.h"
#include "cells/qrnn.h"
#include "cells/sru.h"
#include "elementwise_backward.h"
#include "elementwise_forward.h"

namespace raglane::RAGLANE_TARGET {

template <template <class, class> class Loop, class S> int32_t run_cell(const ElementwiseCall& call) {
  using A = typename Arithmetic<S>::type;
  switch (call.layer->cell) {
    case RAGLANE_INDRNN_TANH: return launch<Loop<IndRnn<A, false>, S>>(call);
    case RAGLANE_INDRNN_RELU: return launch<Loop<IndRnn<A, true>, S>>(call);
    case RAGLANE_MINGRU: return launch<Loop<MinGru<A>, S>>(call);
    case RAGLANE_MINLSTM: return launch<Loop<MinLstm<A>, S>>(call);
    case RAGLANE_QRNN: return launch<Loop<Qrnn<A>, S>>(call);
    case RAGLANE_SRU:
      if (call.layer->weights[0].skip) return launch<Loop<Sru<A, true>, S>>(call);
      return launch<Loop<Sru<A, false>, S>>(call);
  }
  return RAGLANE_BAD_ARGUMENT;
}

template <template <class, class> class Loop> int32_t run(const ElementwiseCall& call) {
  switch (call.layer->dtype) {
#if RAGLANE_LEVEL <= 3  // as in kernels.h
    case RAGLANE_FLOAT32: return run_cell<Loop, float>(call);
    case RAGLANE_FLOAT64: return run_cell<Loop, double>(call);
#endif
    case RAGLANE_BFLOAT16: return run_cell<Loop, bfloat16>(call);
  }
  return RAGLANE_BAD_ARGUMENT;
}

int32_t elementwise_forward(const ElementwiseCall& call) { return run<ElementwiseForward>(call); }
int32_t elementwise_backward(const ElementwiseCall& call) { return run<ElementwiseBackward>(call); }

}  // namespace raglane::RAGLANE_TARGET
