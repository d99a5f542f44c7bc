// A decoded and checked program: plain data for the kernels of all instruction sets.
//
// A step is divided into phases: instructions that process rows one by one, and products, which process all lanes
// together. A local that only one phase uses is kept for a few rows; one that lives across a product is kept per lane.
#pragma once

#include "abi/call.h"

namespace raglane {

// Columns of a block, or a number; see raglane.h.
struct Place {
  int64_t block, start, spread;  // a raglane_spread
  double number;
};

struct CodeBlock {
  int64_t kind, width, index;
  bool carried;  // of a local: written by one phase and read by another
};

struct CodeWeight {
  int64_t groups, rows, depth;
};

struct CodeInstruction {
  int64_t operation, width, segments, groups;
  double epsilon;
  int64_t weight;
  const int64_t* columns;  // of a gather
  const int64_t* runs;     // the same as pairs: the first of adjacent columns, and their number
  Place results[2], operands[3];
};

struct CodeOutput {
  Place place;
  int64_t width;
};

// Slots of the states follow those of the outputs.
struct Code {
  int64_t blocks, weights, instructions, outputs, states;
  const CodeBlock* block;
  const CodeWeight* weight;
  const CodeInstruction* instruction;
  const CodeOutput* output;
  // The index of the first tensor of each kind of block in the call's list; then weights, outputs, final states.
  int64_t first_tensor[RAGLANE_LOCAL + 3];
};

// The number of results and operands of an operation. `each`: it is applied number by number.
struct OperationFacts {
  int results, operands;
  bool each;
};

inline OperationFacts facts_of_operation(int64_t operation) {
  switch (operation) {
    case RAGLANE_OF_ROW_SUM: case RAGLANE_OF_ROW_MAX: case RAGLANE_OF_ROW_CUMSUM: case RAGLANE_OF_GATHER: return {1, 1, false};
    case RAGLANE_OF_NORM: return {2, 1, false};
    case RAGLANE_OF_NORM_BACKWARD: return {1, 3, false};
    case RAGLANE_OF_PRODUCT: case RAGLANE_OF_ROW_DOT: case RAGLANE_OF_COLUMN_DOT: return {1, 2, false};
    case RAGLANE_OF_FMA: case RAGLANE_OF_WHERE: return {1, 3, true};
  }
  return {1, operation < RAGLANE_OF_ADD ? 1 : 2, true};
}

// Columns that an operation reads of an operand (unknown for a gather), and writes of a result.
inline int64_t columns_read(const CodeInstruction& instruction, int operand, const CodeWeight* weights) {
  if (instruction.operation == RAGLANE_OF_NORM_BACKWARD && operand == 2) return instruction.segments;
  if (instruction.operation == RAGLANE_OF_PRODUCT && operand == 1)
    return instruction.segments * weights[instruction.weight].groups * weights[instruction.weight].depth;
  return instruction.width;
}
inline bool is_dot(int64_t operation) {
  return operation == RAGLANE_OF_ROW_DOT || operation == RAGLANE_OF_COLUMN_DOT;
}
// The same for a place of this operand: columns of its block.
inline int64_t columns_of(const CodeInstruction& instruction, int operand, const CodeWeight* weights) {
  switch (instruction.operands[operand].spread) {
    case RAGLANE_ONE: return 1;
    case RAGLANE_BY_ROW: return instruction.segments;
    case RAGLANE_BY_COLUMN: return instruction.groups * (instruction.width / instruction.segments);
  }
  return columns_read(instruction, operand, weights);
}
inline int64_t columns_written(const CodeInstruction& instruction, int result) {
  if (instruction.operation == RAGLANE_OF_COLUMN_DOT)
    return instruction.groups * (instruction.width / instruction.segments);
  bool one_for_each_part = instruction.operation == RAGLANE_OF_ROW_SUM || instruction.operation == RAGLANE_OF_ROW_MAX ||
                           instruction.operation == RAGLANE_OF_ROW_DOT ||
                           (instruction.operation == RAGLANE_OF_NORM && result == 1);
  return one_for_each_part ? instruction.segments : instruction.width;
}

}  // namespace raglane
