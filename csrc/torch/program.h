// A call of a program, from tensors to the struct of the kernels.
#pragma once

#include <algorithm>

#include "held.h"

namespace raglane::operators {

// A call of a program, whose shapes are in `code`; see raglane.h. The kernels check all else in it.
class Program : public Held {
 public:
  raglane_program call{};
  std::vector<Tensor> results;

  Program(const Tensor& code, const Tensor& offsets, const std::vector<Tensor>& inputs, const Parts& over, int64_t flags) {
    // Copied, because another thread may write to it.
    const auto* numbers = (const int64_t*)rows(code, Shape(code.numel()), ScalarType::Long);
    const int64_t size = code.numel(), sizes[] = RAGLANE_CODE_SIZES;
    code_.assign(numbers, numbers + (numbers ? size : 0));
    int64_t total = 6;
    for (int part = 0; part < 6; total += sizes[part] * code_[part], part++)
      if (code_.at(part) < 0 || code_[part] > size) refuse("a count of a program's code is not from 0 to its size");
    if (total != size) refuse("the size of a program's code must match its counts");
    const int64_t *blocks = code_.data() + 6, *weights = blocks + sizes[0] * code_[0];
    const int64_t *instructions = weights + sizes[1] * code_[1], *outputs = instructions + sizes[2] * code_[2];

    dtype = inputs.at(0).scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    poisons = flags & RAGLANE_POISON, call.flags = flags;
    call.abi = RAGLANE_ABI, call.dtype = dtype == ScalarType::Double ? RAGLANE_FLOAT64 : RAGLANE_FLOAT32;
    call.sequences = offsets.numel() - 1;
    call.offsets = (const int64_t*)rows(offsets, Shape(call.sequences + 1), ScalarType::Long);
    if (!call.offsets) refuse("offsets (B + 1) are required");
    call.elements = call.offsets[call.sequences];
    call.code = code_.data(), call.code_size = size;
    size_t input = 0;
    std::vector<int64_t> states;
    for (int64_t kind = RAGLANE_ELEMENT, index = 0; kind < RAGLANE_LOCAL; kind++, index = 0)
      for (const int64_t* block = blocks; block < weights; block += 3) {
        if (block[0] != kind) continue;
        if (block[2] != index++) refuse("the blocks of a program are not in order");
        const int64_t each = kind == RAGLANE_ELEMENT ? call.elements : call.sequences;
        add(inputs.at(input++), kind == RAGLANE_VECTOR ? Shape(block[1]) : Shape(each, block[1]), kind == RAGLANE_ELEMENT);
        if (kind == RAGLANE_STATE) states.push_back(block[1]);
      }
    for (const int64_t* weight = weights; weight < instructions; weight += 3)
      add(inputs.at(input++), {weight[0], weight[1], weight[2]});
    if (input != inputs.size()) refuse("there are more tensors than the program has");
    for (int64_t output = 0; output < code_[3]; output++) {
      const Shape shape(call.elements, outputs[5 * output + 4]);
      if (over.at(output).has_value()) add(*over[output], shape);
      else add_new(shape);
    }
    for (int64_t width : states) add_new({call.sequences, width});
    call.tensors = tensors_.data(), call.tensor_count = (int64_t)tensors_.size();
  }

 private:
  std::vector<int64_t> code_;
  std::vector<raglane_tensor> tensors_;

  void add_new(const Shape& shape) { tensors_.push_back({write(results, shape), call.dtype, {shape.sizes[1], 0, 0}}); }

  void add(const Tensor& tensor, const Shape& shape, bool may_be_narrow = false) {
    const bool is_narrow = may_be_narrow && dtype == ScalarType::Float && tensor.scalar_type() == ScalarType::BFloat16;
    void* data = rows(tensor, shape, is_narrow ? ScalarType::BFloat16 : dtype);
    raglane_tensor made = {data, is_narrow ? (int64_t)RAGLANE_BFLOAT16 : call.dtype, {}};
    if (shape.dims > 1) std::copy_n(held_.back().strides().data(), shape.dims == 2 ? 1 : 3, made.strides);
    tensors_.push_back(made);
  }

  // The address of a vector, of contiguous rows, or of three dimensions of any strides.
  void* rows(const Tensor& tensor, const Shape& shape, ScalarType type) {
    if (!is_like(tensor, shape, type)) refuse("a tensor does not fit the program");
    void* address = hold(tensor, shape, tensor.strides().data());
    const int64_t last = shape.dims - 1;
    fits &= last == 2 || shape.sizes[last] <= 1 || held_.back().strides()[last] == 1;
    if (!fits) refuse("the kernels cannot read a tensor");
    return address;
  }
};

}  // namespace raglane::operators
