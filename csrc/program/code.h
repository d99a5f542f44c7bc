// A program, decoded and checked: plain data, which the kernels of all instruction sets read.
//
// A step is divided into phases: instructions that take rows by themselves, and products, which take all lanes at once.
// What a phase computes for itself alone is kept for a few rows; a local that lives across a product is kept per lane.
#pragma once

#include "abi/call.h"

namespace raglane {

// Columns of a block, or a number; see raglane.h.
struct Place {
  int64_t block, start, spread;
  double number;
};

struct CodeBlock {
  int64_t kind, width, index;
  bool carried;  // of a local: one phase reads what another writes
};

struct CodeWeight {
  int64_t groups, rows, depth;
};

struct CodeInstruction {
  int64_t operation, width, segments;
  double epsilon;
  int64_t weight;
  const int64_t* columns;
  Place results[2], operands[3];
};

struct CodeOutput {
  Place place;
  int64_t width;
};

// Those of the states follow those of the outputs.
struct Code {
  int64_t blocks, weights, instructions, outputs, states;
  const CodeBlock* block;
  const CodeWeight* weight;
  const CodeInstruction* instruction;
  const CodeOutput* output;
  // Where the tensors of each kind of block begin in the call's; then weights, outputs, final states.
  int64_t first_tensor[RAGLANE_LOCAL + 3];
};

// How many results and operands an operation has. `each`: it takes one number at a time.
struct OperationFacts {
  int results, operands;
  bool each;
};

inline OperationFacts facts_of_operation(int64_t operation) {
  switch (operation) {
    case RAGLANE_OF_ROW_SUM: case RAGLANE_OF_ROW_MAX: case RAGLANE_OF_ROW_CUMSUM: case RAGLANE_OF_GATHER: return {1, 1, false};
    case RAGLANE_OF_NORM: return {2, 1, false};
    case RAGLANE_OF_NORM_BACKWARD: return {1, 3, false};
    case RAGLANE_OF_PRODUCT: return {1, 2, false};
    case RAGLANE_OF_FMA: case RAGLANE_OF_WHERE: return {1, 3, true};
  }
  return {1, operation < RAGLANE_OF_ADD ? 1 : 2, true};
}

// Columns that an operation reads of an operand (of a gather none is known), and writes of a result.
inline int64_t columns_read(const CodeInstruction& instruction, int operand, const CodeWeight* weights) {
  if (instruction.operation == RAGLANE_OF_NORM_BACKWARD && operand == 2) return instruction.segments;
  if (instruction.operation == RAGLANE_OF_PRODUCT && operand == 1)
    return weights[instruction.weight].groups * weights[instruction.weight].depth;
  return instruction.width;
}
inline int64_t columns_written(const CodeInstruction& instruction, int result) {
  bool one_for_each_part = instruction.operation == RAGLANE_OF_ROW_SUM || instruction.operation == RAGLANE_OF_ROW_MAX ||
                           (instruction.operation == RAGLANE_OF_NORM && result == 1);
  return one_for_each_part ? instruction.segments : instruction.width;
}

}  // namespace raglane
