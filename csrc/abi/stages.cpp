// The stages of a model: calls that follow each other, on one batch.
#include "abi/checks.h"
#include "abi/failure.h"

using namespace raglane;

extern "C" int32_t raglane_run_stages(const raglane_stage* stages, int64_t count, int64_t threads, int64_t sequences,
                                      int64_t elements, char* message, int64_t size) {
  int32_t status = guarded(message, size, [&] {
    at_least("count", count, 0);
    for (int64_t i = 0; i < count; i++) {
      present("stages", stages);
      if (!stages[i].layer == !stages[i].program) fail("a stage must be a layer or a program");
    }
    return RAGLANE_OK;
  });
  auto on_batch = [&](auto call) {
    call.threads = threads, call.sequences = sequences, call.elements = elements;
    return call;
  };
  for (int64_t i = 0; i < count && status == RAGLANE_OK; i++) {
    if (stages[i].layer) {
      raglane_layer layer = on_batch(*stages[i].layer);
      status = raglane_forward(&layer, message, size);
    } else {
      raglane_program program = on_batch(*stages[i].program);
      status = raglane_run_program(&program, message, size);
    }
  }
  return status;
}
