// A call of a layer, from tensors to the struct of the kernels.
#pragma once

#include <cstddef>

#include "rows.h"

namespace raglane::operators {

// One weight of a direction: its places in the struct, and its shape.
struct Weight {
  const void* raglane_weights::*field;
  void* raglane_weight_gradients::*gradient;
  Shape shape;
  bool exists, is_optional;
};

// The integers of raglane_layer before its addresses. A head has them, whose counts are not read, and the least bytes of a
// block.
constexpr int64_t field_count = offsetof(raglane_layer, offsets) / sizeof(int64_t), head_size = field_count + 1;

// The integers of the layers of a stack, one after the other.
inline const int64_t* fields_of(const Tensor& heads, int64_t layers) {
  const void* fields = layers > 0 ? Held().look(heads, {layers * head_size}, ScalarType::Long) : nullptr;
  if (!fields) refuse("heads of layers are required");
  return static_cast<const int64_t*>(fields);
}

// The sequences of a call whose values are in the order of flat ones.
struct Sequences {
  const int64_t* offsets;  // (count + 1)
  int64_t count, elements;
  Shape lead;              // of values and output, without the features
  bool is_batched = true;  // states have a dimension of the sequences
};

// A call of a layer.
class Layer : public Held {
 public:
  raglane_layer call;
  raglane_cell_facts facts{};
  std::optional<Tensor> flat;  // for the flat values of a table, unless the kernels read its rows

  // With `rows`, `values` are their table, which the kernels read in place if no backward pass needs flat values.
  Layer(const int64_t* fields, const Tensor& offsets, const Tensor& values, const Parts& parts, bool has_packed = false,
        Rows* rows = nullptr, bool saves = true) {
    begin(fields);
    const int64_t count = offsets.numel() - 1;
    const bool is_step = values.dim() == 1;
    fits &= is_step ? count == 1 : values.dim() > 0 && count >= 0;
    if (!fits) return;
    const int64_t elements = rows ? rows->elements() : is_step ? 1 : values.sizes()[0];
    const auto* numbers = static_cast<int64_t*>(read(offsets, {count + 1}, ScalarType::Long));
    if (rows && !is_like(values, rows->shape_of(call.input_size), dtype)) return;
    if (rows && (saves || facts.is_elementwise || !values.is_contiguous())) flat = empty({elements, call.input_size}, dtype);
    else rows_ = rows;
    set({numbers, count, elements, is_step ? Shape() : Shape(elements), !is_step}, flat ? *flat : values, parts, has_packed);
  }

  Layer(const int64_t* fields, const Sequences& sequences, const Tensor& values, const Parts& parts, bool has_packed) {
    begin(fields);
    set(sequences, values, parts, has_packed);
  }

  void require_fit() const {
    if (!fits) refuse("a tensor does not fit the layer, or the kernels cannot read it");
  }

  // The number of states among the parts, before the weights.
  size_t begin() const { return begin_; }
  const Weight& weight(size_t part) const { return weights_[(part - begin_) % each_]; }

  int64_t state_size() const { return call.projection_size ? call.projection_size : call.hidden_size; }
  Shape of_state(int state) const {
    const int64_t size = state ? call.hidden_size : state_size();
    return is_batched_ ? Shape(call.directions, call.sequences, size) : Shape(call.directions, size);
  }
  Shape of_output() const { return of_rows(call.directions * state_size()); }
  // Numbers that forward saves for backward: none where backward recomputes the gates.
  Shape of_gates() const {
    const bool skips = facts.skips && call.input_size != call.hidden_size;
    const int64_t own = facts.is_elementwise ? (facts.saved + skips) * call.hidden_size
                                             : facts.saved && !call.checkpoint_every ? call.gate_stride : 0;
    return {call.directions, call.elements, own};
  }
  Shape of_c_states() const {
    const int64_t size = facts.has_c ? call.hidden_size : 0;
    return facts.is_elementwise ? Shape(call.elements, call.directions * size) : Shape(call.directions, call.elements, size);
  }

  void* read(const std::optional<Tensor>& part, const Shape& shape) {
    return part.has_value() ? read(*part, shape, dtype) : nullptr;
  }

  // The address of a tensor's numbers.
  void* read(const Tensor& tensor, const Shape& shape, ScalarType type) {
    if (!is_like(tensor, shape, type)) return nullptr;
    if (!tensor.is_contiguous()) {
      fits &= has_all_numbers(tensor);
      return fits ? read(torch::stable::contiguous(tensor), shape, type) : nullptr;
    }
    return hold(tensor, shape, Strides(shape).of);
  }
  // The bytes of the packed weights of this layer, counted again only when a thread calls another one.
  int64_t packed_bytes() {
    thread_local int64_t counted_for[field_count + 1] = {};
    thread_local int64_t bytes = 0;
    raglane_layer empty = call;
    empty.sequences = empty.elements = 0;
    int64_t key[field_count + 1] = {};
    std::memcpy(key, &empty, sizeof(int64_t) * field_count);
    for (int64_t k = 0; k < call.directions; k++)
      for (size_t place = 0; place < each_; place++)
        key[field_count] = 2 * key[field_count] + (call.weights[k].*weights_[place].field != nullptr);
    // The ABI's number is not zero, as before the first call and after a refused one.
    if (std::memcmp(key, counted_for, sizeof key) == 0) return bytes;
    char message[256] = "";
    counted_for[0] = 0;
    require_ok(raglane_pack(&empty, nullptr, &bytes, message, sizeof message), message);
    std::memcpy(counted_for, key, sizeof key);
    return bytes;
  }
  void* scratch(const Shape& shape) { return keep(held_, shape); }

  template <class Function> void run(Function function) {
    char message[256] = "";
    require_ok(function(&call, message, sizeof message), message);
  }

 private:
  Weight weights_[5];
  size_t each_ = 0, begin_ = 0;
  Shape lead_;
  bool is_batched_ = true;
  Rows* rows_ = nullptr;  // of values and output, if the kernels read and write these

  void begin(const int64_t* fields) {
    std::memset(&call, 0, sizeof call);
    std::memcpy(&call, fields, sizeof(int64_t) * field_count);
    least_block = fields[field_count];
    // The struct's layout is that of the header that this file was compiled with.
    if (call.abi != RAGLANE_ABI || raglane_abi() != RAGLANE_ABI)
      refuse("the kernels are of another version; reinstall raglane");
    char message[256] = "";
    require_ok(raglane_describe_cell(call.cell, &facts, message, sizeof message), message);
    dtype = dtype_of(call.dtype), poisons = call.flags & RAGLANE_POISON;
    fits &= call.directions >= 1 && call.directions <= 2;
    held_.reserve(24);
  }

  // Of weights that are packed the kernels read only which there are, and no bias. So they may be missing.
  void set(const Sequences& sequences, const Tensor& values, const Parts& parts, bool has_packed) {
    if (!fits) return;
    call.offsets = sequences.offsets, call.sequences = sequences.count, call.elements = sequences.elements;
    lead_ = sequences.lead, is_batched_ = sequences.is_batched;
    call.values = read(values, of_rows(call.input_size), dtype);
    set_weights();
    const size_t states = facts.has_c ? 2 : 1, weights = call.directions * each_, count = parts.size();
    const bool has_weights = count >= weights;
    begin_ = has_weights ? count - weights : count;
    if ((begin_ != 0 && begin_ != states) || (!has_weights && !has_packed)) {
      fits = false;
      return;
    }
    if (begin_ > 0) {
      fits &= parts[0].has_value() && parts[states - 1].has_value();
      call.initial_h = read(parts[0], of_state(0));
      if (facts.has_c) call.initial_c = read(parts[1], of_state(1));
    }
    for (int64_t k = 0; k < call.directions; k++)
      for (size_t place = 0; place < each_; place++) {
        const Weight& weight = weights_[place];
        const void*& address = call.weights[k].*weight.field;
        if (!has_weights) {
          address = weight.exists && !weight.is_optional ? &weight : nullptr;
          continue;
        }
        const auto& part = parts[begin_ + k * each_ + place];
        fits &= part.has_value() ? weight.exists : weight.is_optional || !weight.exists;
        address = has_packed && part.has_value() ? &part : read(part, weight.shape);
      }
  }

  // The shape of values, or of the output, with a number of features.
  Shape of_rows(int64_t features) const {
    if (rows_) return rows_->shape_of(features);
    if (lead_.dims == 0) return {features};
    return lead_.dims == 1 ? Shape(lead_.sizes[0], features) : Shape(lead_.sizes[0], lead_.sizes[1], features);
  }

  static ScalarType dtype_of(int64_t number) {
    if (number == RAGLANE_FLOAT64) return ScalarType::Double;
    if (number == RAGLANE_BFLOAT16) return ScalarType::BFloat16;
    return ScalarType::Float;  // also with int8 weights
  }

  void set_weights() {
    using W = raglane_weights;
    using G = raglane_weight_gradients;
    const int64_t hidden = call.hidden_size, input = call.input_size, rows = facts.gates * hidden, state = state_size();
    if (!facts.is_elementwise) {
      each_ = 5;
      weights_[0] = {&W::input, &G::input, {rows, input}, true, false};
      weights_[1] = {&W::hidden, &G::hidden, {rows, state}, true, false};
      weights_[2] = {&W::input_bias, &G::input_bias, {rows}, true, true};
      weights_[3] = {&W::hidden_bias, &G::hidden_bias, {rows}, true, true};
      weights_[4] = {&W::projection, &G::projection, {state, hidden}, call.projection_size > 0, false};
    } else {
      each_ = 4;
      weights_[0] = {&W::input, &G::input, {rows, input}, true, false};
      weights_[1] = {&W::hidden, &G::hidden, {facts.factors * hidden}, facts.factors > 0, false};
      weights_[2] = {&W::input_bias, &G::input_bias, {facts.biases * hidden}, true, true};
      weights_[3] = {&W::skip, &G::skip, {hidden, input}, facts.skips && input != hidden, false};
    }
  }
};

}  // namespace raglane::operators
