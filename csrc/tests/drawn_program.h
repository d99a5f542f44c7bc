// Random programs, for the driver.
#pragma once

#include "tests/drawing.h"

// A random program in integers, and its inputs: a few instructions that each write their own local, with
// products among them.
struct DrawnProgram {
  raglane_program call{};
  std::vector<int64_t> offsets, code, widths;  // of the blocks
  std::vector<raglane_tensor> tensors;
  std::vector<Bytes> inputs, results;
  std::mt19937& random;
  int64_t states = 0;
  std::vector<int64_t> blocks, weights, instructions, ends;

  explicit DrawnProgram(std::mt19937& random) : random(random) {}

  int64_t block(int64_t kind, int64_t width, int64_t index) {
    blocks.insert(blocks.end(), {kind, width, index});
    widths.push_back(width);
    return (int64_t)widths.size() - 1;
  }
  void place(std::vector<int64_t>& to, int64_t block, int64_t start, int64_t spread) {
    to.insert(to.end(), {block, start, spread, 0});
  }
  // Existing columns, more often than not of the latest local.
  void operand(std::vector<int64_t>& to, int64_t width) {
    std::vector<int64_t> fits;
    for (int64_t b = 0; b < (int64_t)widths.size(); b++)
      if (widths[b] >= width) fits.push_back(b);
    if (fits.empty() || below(random, 8) == 0) return place(to, -1, 0, 0);
    int64_t from = fits[below(random, 2) ? below(random, (int)fits.size()) : (int64_t)fits.size() - 1];
    place(to, from, below(random, (int)(widths[from] - width + 1)), 0);
  }
  // The same for a matrix, of which an operand may repeat columns.
  void operand_of_matrix(std::vector<int64_t>& to, int64_t rows, int64_t columns, int64_t groups) {
    const int64_t spread = below(random, 4), widths_of[] = {rows * columns, 1, rows, groups * columns};
    operand(to, widths_of[spread]);
    if (to[to.size() - 4] >= 0) to[to.size() - 2] = spread;
  }
  void tensor(int64_t rows, int64_t width, bool is_result, bool is_narrow = false) {
    int64_t dtype = is_narrow ? (int64_t)RAGLANE_BFLOAT16 : call.dtype;
    std::vector<Bytes>& owner = is_result ? results : inputs;
    owner.push_back(random_reals(dtype, rows * width, random));
    tensors.push_back({owner.back().data(), dtype, {width, 1, 1}});
  }
  void instruction() {
    static const int64_t operations[] = {RAGLANE_OF_TANH, RAGLANE_OF_SIGMOID, RAGLANE_OF_ADD, RAGLANE_OF_FMA,
                                         RAGLANE_OF_NORM, RAGLANE_OF_ROW_MAX, RAGLANE_OF_PRODUCT, RAGLANE_OF_PRODUCT,
                                         RAGLANE_OF_ROW_DOT, RAGLANE_OF_COLUMN_DOT};
    int64_t operation = operations[below(random, 10)], width = 1 + below(random, 70), segments = 1, weight = -1;
    const bool is_dot = operation == RAGLANE_OF_ROW_DOT || operation == RAGLANE_OF_COLUMN_DOT;
    const bool is_each = operation == RAGLANE_OF_FMA || operation == RAGLANE_OF_ADD;
    int64_t operands = operation == RAGLANE_OF_FMA ? 3 : is_dot || is_each ? 2 : 1, groups_of_rows = 1, written = width;
    std::vector<int64_t> from;
    if (operation == RAGLANE_OF_PRODUCT) {
      int64_t groups = 1 + below(random, 2), depth = 1 + below(random, 20);
      weight = (int64_t)weights.size() / 3;
      weights.insert(weights.end(), {groups, width, depth});
      segments += below(random, 3);
      width *= segments * groups, operands = 2;
      operand(from, width), operand(from, segments * groups * depth);
      written = width;
    } else if (is_dot || (is_each && below(random, 2))) {
      groups_of_rows = 1 + below(random, 3), segments = groups_of_rows * (1 + below(random, 4));
      const int64_t columns = 1 + below(random, 20);
      width = segments * columns;
      for (int64_t i = 0; i < operands; i++) operand_of_matrix(from, segments, columns, groups_of_rows);
      written = operation == RAGLANE_OF_ROW_DOT ? segments : operation == RAGLANE_OF_COLUMN_DOT ? groups_of_rows * columns : width;
    } else {
      for (int64_t i = 0; i < operands; i++) operand(from, width);
      if (operation == RAGLANE_OF_ROW_MAX) written = 1;
    }
    for (; operands < 3; operands++) place(from, -1, 0, 0);
    double epsilon = 0.1;
    int64_t bits;
    std::memcpy(&bits, &epsilon, sizeof bits);
    instructions.insert(instructions.end(), {operation, width, segments, bits, weight, 0, groups_of_rows});
    int64_t result = block(RAGLANE_LOCAL, written, 0);
    place(instructions, result, 0, 0);
    place(instructions, operation == RAGLANE_OF_NORM ? block(RAGLANE_LOCAL, 1, 0) : -1, 0, 0);
    instructions.insert(instructions.end(), from.begin(), from.end());
  }

  void draw() {
    raglane_program& p = call;
    p.abi = RAGLANE_ABI, p.dtype = below(random, 2), p.ascending = below(random, 2), p.sequences = below(random, 12);
    p.isa = any_isa(random);
    offsets.push_back(0);
    for (int64_t b = 0; b < p.sequences; b++)
      offsets.push_back(offsets.back() + (below(random, 4) ? below(random, 9) : 0));
    p.elements = offsets.back(), p.offsets = offsets.data();
    inputs.reserve(64), results.reserve(64);
    states = below(random, 3);
    int64_t count = 1 + below(random, 8), outputs = 1 + below(random, 3);
    bool is_narrow = p.dtype == RAGLANE_FLOAT32 && below(random, 3) == 0;
    int64_t sizes[] = {1 + below(random, 40), 1 + below(random, 40), 1 + below(random, 40)};
    block(RAGLANE_ELEMENT, sizes[0], 0), block(RAGLANE_SEQUENCE, sizes[1], 0), block(RAGLANE_VECTOR, sizes[2], 0);
    for (int64_t s = 0; s < states; s++) block(RAGLANE_STATE, 1 + below(random, 40), s);
    for (int64_t i = 0; i < count; i++) instruction();
    tensor(p.elements, sizes[0], false, is_narrow), tensor(p.sequences, sizes[1], false);
    for (int64_t s = 0; s < states; s++) tensor(p.sequences, widths[3 + s], false);
    tensor(1, sizes[2], false);
    for (size_t w = 0; w < weights.size(); w += 3) {
      int64_t rows = weights[w + 1], depth = weights[w + 2];
      tensor(weights[w], rows * depth, false);
      const bool is_turned = below(random, 2);
      int64_t* strides = tensors.back().strides;
      strides[0] = rows * depth, strides[1] = is_turned ? 1 : depth, strides[2] = is_turned ? rows : 1;
    }
    for (int64_t o = 0; o < outputs; o++) {
      int64_t width = 1 + below(random, 40);
      operand(ends, width);
      ends.push_back(width);
      tensor(p.elements, width, true, is_narrow && o == 0);
    }
    for (int64_t s = 0; s < states; s++) operand(ends, widths[3 + s]), tensor(p.sequences, widths[3 + s], true);
    code = {(int64_t)widths.size(), (int64_t)weights.size() / 3, count, outputs, states, 0};
    for (std::vector<int64_t>* part : {&blocks, &weights, &instructions, &ends})
      code.insert(code.end(), part->begin(), part->end());
    p.code = code.data(), p.code_size = (int64_t)code.size();
    p.tensors = tensors.data(), p.tensor_count = (int64_t)tensors.size();
  }
};
