// The functions of csrc/tests/rates.cpp that are compiled per instruction set.
#pragma once

#include <stdint.h>

#include "targets/targets.h"

namespace raglane {

// A product of `rows` rows with one panel of `vectors` vectors, `depth` numbers deep.
struct Shape {
  int rows, vectors;
  int64_t depth;
};

struct Rates {
  int most_vectors, width;  // of a tile; numbers in a vector of sums
  int (*most_rows)(int vectors);
  // Fused multiply-adds in registers; returns the operations.
  int64_t (*peak)(int64_t dtype, int64_t rounds);
  // The micro-kernel over `panels` panels, `rounds` times; returns the operations, or 0 if memory is exhausted.
  int64_t (*multiply)(int64_t dtype, const Shape& shape, int64_t panels, int64_t rounds);
  // Exponentials of numbers in the nearest cache; returns their number.
  int64_t (*exponentials)(int64_t dtype, int64_t rounds);
};
#define RAGLANE_DECLARE(name, ...) \
  namespace name { extern const Rates rates; }
RAGLANE_TARGETS(RAGLANE_DECLARE)
#undef RAGLANE_DECLARE

}  // namespace raglane
