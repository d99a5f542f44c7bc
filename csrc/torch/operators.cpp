// The layers and programs of the kernels as operators of torch, in C++ from the arguments to the results.
//
// It uses only torch's stable ABI: the binary runs with torch 2.11 and every later version. `forward` and `backward` are
// called by kernels/cpu/layer.py, `run_program` by kernels/cpu/programs.py, and `layer` by models that AOTInductor
// compiled, without Python. All tensors are checked before the kernels get their addresses.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "raglane.h"

namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Parts = std::vector<std::optional<Tensor>>;

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("raglane::layer: " + what); }

struct Shape {
  int64_t dims, sizes[3];
  Shape() : dims(0), sizes{} {}
  Shape(int64_t a) : dims(1), sizes{a, 0, 0} {}
  Shape(int64_t a, int64_t b) : dims(2), sizes{a, b, 0} {}
  Shape(int64_t a, int64_t b, int64_t c) : dims(3), sizes{a, b, c} {}
  int64_t count() const {
    int64_t total = 1;
    for (int64_t place = 0; place < dims; place++) total *= sizes[place];
    return total;
  }
};

struct Strides {
  int64_t of[3];
  explicit Strides(const Shape& shape) {
    for (int64_t place = shape.dims - 1, stride = 1; place >= 0; stride *= shape.sizes[place--]) of[place] = stride;
  }
};

Tensor empty(const Shape& shape, ScalarType dtype) {
  AtenTensorHandle handle;
  const Strides strides(shape);
  const auto number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(shape.dims, shape.sizes, strides.of, number, 0, 0, &handle));
  return Tensor(handle);
}

int64_t width_of(ScalarType dtype) { return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2; }

void require_ok(int32_t status, const char* message) {
  if (status != RAGLANE_OK) refuse(message);
}

// The tensors of a call, and the storages that its addresses belong to, which another thread may replace.
class Held {
 public:
  ScalarType dtype;
  bool poisons = false;
  bool fits = true;  // false if a tensor is not the call's, or the kernels cannot read it

  bool is_like(const Tensor& tensor, const Shape& shape, ScalarType type) {
    const auto sizes = tensor.sizes();
    fits &= (int64_t)sizes.size() == shape.dims && tensor.scalar_type() == type &&
            tensor.device().type() == DeviceType::CPU;
    for (int64_t place = 0; fits && place < shape.dims; place++) fits = sizes[place] == shape.sizes[place];
    return fits;
  }

  // The address of a tensor's numbers. A view of its own keeps the storage alive.
  void* hold(const Tensor& tensor, const Shape& shape, const int64_t* strides) {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), shape.dims, shape.sizes, strides, 0, &handle));
    const Tensor& view = held_.emplace_back(handle);
    void* address = view.data_ptr();
    if (shape.count() == 0) return nullptr;
    fits = address && has_all_numbers(view);
    return address;
  }

  // A new tensor, and its address.
  void* write(std::vector<Tensor>& results, const Shape& shape) {
    void* address = results.emplace_back(empty(shape, dtype)).data_ptr();
    if (poisons) std::memset(address, 0xff, shape.count() * width_of(dtype));
    return address;
  }

 protected:
  std::vector<Tensor> held_;

  // True if the storage contains the last number of a tensor of any strides.
  static bool has_all_numbers(const Tensor& tensor) {
    int64_t bytes, last = tensor.storage_offset();
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
    for (int64_t place = 0; place < tensor.dim(); place++) last += (tensor.size(place) - 1) * tensor.stride(place);
    return bytes >= (last + 1) * (int64_t)tensor.element_size();
  }
};

// One weight of a direction: its places in the struct, and its shape.
struct Weight {
  const void* raglane_weights::*field;
  void* raglane_weight_gradients::*gradient;
  Shape shape;
  bool exists, is_optional;
};

// The integers of raglane_layer before its addresses.
constexpr int64_t head_size = offsetof(raglane_layer, offsets) / sizeof(int64_t);

// A call of a layer.
class Layer : public Held {
 public:
  raglane_layer call;
  raglane_cell_facts facts;

  Layer(const Tensor& head, const Tensor& offsets, const Tensor& values, const Parts& parts, bool has_packed = false) {
    std::memset(&call, 0, sizeof call);
    const void* fields = read(head, {head_size}, ScalarType::Long);
    if (fields) std::memcpy(&call, fields, sizeof(int64_t) * head_size);
    // The struct's layout is that of the header that this file was compiled with.
    if (call.abi != RAGLANE_ABI || raglane_abi() != RAGLANE_ABI)
      refuse("the kernels are of another version; reinstall raglane");
    char message[256] = "";
    require_ok(raglane_describe_cell(call.cell, &facts, message, sizeof message), message);
    dtype = dtype_of(call.dtype), poisons = call.flags & RAGLANE_POISON;
    call.sequences = offsets.numel() - 1;
    is_step_ = values.dim() == 1;
    call.elements = is_step_ ? 1 : values.sizes()[0];
    fits = call.directions >= 1 && call.directions <= 2 && call.sequences >= 0 && (!is_step_ || call.sequences == 1);
    if (!fits) return;
    held_.reserve(24);
    call.offsets = static_cast<int64_t*>(read(offsets, {call.sequences + 1}, ScalarType::Long));
    call.values = read(values, is_step_ ? Shape(call.input_size) : Shape(call.elements, call.input_size), dtype);
    set_weights();
    const size_t states = facts.has_c ? 2 : 1, weights = call.directions * each_;
    if (parts.size() == states + weights) {
      begin_ = states;
      fits &= parts[0].has_value() && parts[states - 1].has_value();
      call.initial_h = read(parts[0], of_state(0));
      if (facts.has_c) call.initial_c = read(parts[1], of_state(1));
    } else if (parts.size() != weights) {
      fits = false;
      return;
    }
    for (int64_t k = 0; k < call.directions; k++)
      for (size_t place = 0; place < each_; place++) {
        const auto& part = parts[begin_ + k * each_ + place];
        const Weight& weight = weights_[place];
        fits &= part.has_value() ? weight.exists : weight.is_optional || !weight.exists;
        // Of weights that are packed the kernels read only which there are.
        call.weights[k].*weight.field = has_packed && part.has_value() ? &part : read(part, weight.shape);
      }
  }

  // The number of states among the parts, before the weights.
  size_t begin() const { return begin_; }
  const Weight& weight(size_t part) const { return weights_[(part - begin_) % each_]; }

  int64_t state_size() const { return call.projection_size ? call.projection_size : call.hidden_size; }
  Shape of_state(int state) const {
    const int64_t size = state ? call.hidden_size : state_size();
    return is_step_ ? Shape(call.directions, size) : Shape(call.directions, call.sequences, size);
  }
  Shape of_output() const {
    const int64_t size = call.directions * state_size();
    return is_step_ ? Shape(size) : Shape(call.elements, size);
  }
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
      fits = has_all_numbers(tensor);
      return fits ? read(torch::stable::contiguous(tensor), shape, type) : nullptr;
    }
    return hold(tensor, shape, Strides(shape).of);
  }
  void* scratch(const Shape& shape) { return write(held_, shape); }

  bool is_large(const Shape& shape) const { return shape.count() * width_of(dtype) >= raglane_least_block(); }

  template <class Function> void run(Function function) {
    char message[256] = "";
    require_ok(function(&call, message, sizeof message), message);
  }

 private:
  Weight weights_[5];
  size_t each_ = 0, begin_ = 0;
  bool is_step_;

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

// `head` (15), int64: the fields of raglane_layer before its addresses, whose counts are not read. Returns the output, if
// it is needed or saved; the final states; the gates, if saved; and c after each element, if needed or
// saved. Nothing if the kernels cannot read a tensor, or if so much is saved that the caller has its own memory for it.
std::vector<Tensor> run_forward(const Tensor& head, const Tensor& offsets, const Tensor& values, const Parts& parts,
                                const std::optional<Tensor>& packed, bool need_output, bool save, bool need_c) {
  Layer layer(head, offsets, values, parts, packed.has_value());
  raglane_layer& call = layer.call;
  std::vector<Tensor> results;
  if (packed.has_value()) {
    // The kernels compare its header with the call.
    const int64_t bytes = packed->numel();
    layer.fits &= packed->element_size() == 1 && bytes >= 64;
    call.packed = layer.read(*packed, {bytes}, packed->scalar_type());
  }
  if (!layer.fits || (save && (layer.is_large(layer.of_gates()) || layer.is_large(layer.of_c_states())))) return results;
  results.reserve(5);
  if (need_output || save) call.output = layer.write(results, layer.of_output());
  call.final_h = layer.write(results, layer.of_state(0));
  if (layer.facts.has_c) call.final_c = layer.write(results, layer.of_state(1));
  if (save) call.gates = layer.write(results, layer.of_gates());
  if (save || need_c) call.c_states = layer.write(results, layer.of_c_states());
  layer.run(raglane_forward);
  return results;
}

// Gradients of the values and parts, those that are needed. `saved`: the output, gates and c of forward, then the
// gradients of the output, of c after each element and of the final states, or none for zeros. `over_gates` and `over_c`:
// the memory of saved gates and c may be overwritten. Nothing as in forward.
std::vector<Tensor> run_backward(const Tensor& head, const Tensor& offsets, const Tensor& values, const Parts& parts,
                                 const Parts& saved, const std::vector<bool>& needed, bool over_gates, bool over_c) {
  Layer layer(head, offsets, values, parts);
  raglane_layer& call = layer.call;
  std::vector<Tensor> results;
  const bool is_matrix = !layer.facts.is_elementwise;
  if (!layer.fits || saved.size() != 7 || needed.size() != 1 + parts.size() || values.dim() != 2) return results;
  const Shape of_output = layer.of_output(), of_gates = layer.of_gates(), of_c = layer.of_c_states();
  call.output = layer.read(saved[0], of_output);
  call.gates = layer.read(saved[1], of_gates);
  call.c_states = layer.read(saved[2], of_c);
  call.grad_output = layer.read(saved[3], of_output);
  call.grad_c_states = layer.read(saved[4], of_c);
  call.grad_final_h = layer.read(saved[5], layer.of_state(0));
  call.grad_final_c = layer.read(saved[6], layer.of_state(1));
  // With recomputed gates these are in the kernels' scratch.
  const int64_t k = call.directions, n = call.checkpoint_every ? 0 : call.elements, hidden = call.hidden_size;
  const Shape of_grads = is_matrix ? Shape(k, n, call.gate_stride)
                                   : Shape(k, n, (layer.facts.gates + (call.weights[0].skip != nullptr)) * hidden);
  if (!layer.fits || layer.is_large(of_grads) || layer.is_large({k, n, layer.state_size()})) return results;
  call.grad_gates = over_gates && of_gates.sizes[2] ? call.gates : layer.scratch(of_grads);
  if (is_matrix) {
    call.previous_h = over_c ? call.c_states : layer.scratch({k, n, layer.state_size()});
    if (call.projection_size) {
      call.grad_h = layer.scratch({k, n, call.projection_size});
      call.unprojected = layer.scratch({k, n, hidden});
    }
  } else if (layer.facts.skips && !call.weights[0].skip) {
    call.grad_skip = layer.scratch({k, n, hidden});
  }
  results.reserve(needed.size());
  if (needed[0]) call.grad_values = layer.write(results, {call.elements, call.input_size});
  for (size_t part = 0; part < parts.size(); part++) {
    if (!needed[1 + part] || !parts[part].has_value()) continue;
    if (part < layer.begin()) {
      (part ? call.grad_initial_c : call.grad_initial_h) = layer.write(results, layer.of_state((int)part));
      continue;
    }
    const Weight& weight = layer.weight(part);
    call.grad_weights[(part - layer.begin()) / ((parts.size() - layer.begin()) / k)].*weight.gradient =
        layer.write(results, weight.shape);
  }
  layer.run(raglane_backward);
  return results;
}

// A call of a program, whose shapes are in `code`; see raglane.h. The kernels check all else in it.
class Program : public Held {
 public:
  raglane_program call{};
  std::vector<Tensor> results;

  Program(const Tensor& code, const Tensor& offsets, const std::vector<Tensor>& inputs, const Parts& over, int64_t flags) {
    // Copied, because another thread may write to it.
    const auto* numbers = (const int64_t*)rows(code, Shape(code.numel()), ScalarType::Long);
    const int64_t size = code.numel(), sizes[] = {3, 3, 26, 5, 4, 1};
    code_.assign(numbers, numbers + (numbers ? size : 0));
    int64_t total = 6;
    for (int part = 0; part < 6; total += sizes[part] * code_[part], part++)
      if (code_.at(part) < 0 || code_[part] > size) refuse("the code of a program has a wrong count");
    if (total != size) refuse("the code of a program is not what it counts");
    const int64_t *blocks = code_.data() + 6, *weights = blocks + 3 * code_[0];
    const int64_t *instructions = weights + 3 * code_[1], *outputs = instructions + 26 * code_[2];

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

// The outputs (N, width) of a program that are not in the memory of `over`, and the final states (B, width). `inputs`:
// elements, sequences, states, vectors and weights. Nothing if the kernels cannot read a tensor.
std::vector<Tensor> run_program(const Tensor& code, const Tensor& offsets, const std::vector<Tensor>& inputs,
                                const Parts& over, int64_t isa, int64_t flags, int64_t threads, bool ascending) {
  Program program(code, offsets, inputs, over, flags);
  program.call.isa = isa, program.call.threads = threads, program.call.ascending = ascending;
  char message[256] = "";
  require_ok(raglane_run_program(&program.call, message, sizeof message), message);
  return program.results;
}

// Python reports the errors, of a call of its own.
std::vector<Tensor> forward(Tensor head, Tensor offsets, Tensor values, Parts parts, std::optional<Tensor> packed,
                            bool need_output, bool save, bool need_c) {
  try {
    return run_forward(head, offsets, values, parts, packed, need_output, save, need_c);
  } catch (const std::exception&) {
    return {};
  }
}

std::vector<Tensor> backward(Tensor head, Tensor offsets, Tensor values, Parts parts, Parts saved,
                             std::vector<bool> needed, bool over_gates, bool over_c) {
  try {
    return run_backward(head, offsets, values, parts, saved, needed, over_gates, over_c);
  } catch (const std::exception&) {
    return {};
  }
}

std::vector<Tensor> program(Tensor code, Tensor offsets, std::vector<Tensor> inputs, Parts over, int64_t isa,
                            int64_t flags, int64_t threads, bool ascending) {
  try {
    return run_program(code, offsets, inputs, over, isa, flags, threads, ascending);
  } catch (const std::exception&) {
    return {};
  }
}

int64_t best_isa() {
  int64_t best = 0;
  for (int64_t isa = 0; raglane_isa_name(isa); isa++)
    if (raglane_has_isa(isa)) best = isa;
  return best;
}

int64_t number_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return RAGLANE_FLOAT32;
  if (dtype == ScalarType::Double) return RAGLANE_FLOAT64;
  if (dtype == ScalarType::BFloat16) return RAGLANE_BFLOAT16;
  refuse("the kernels compute in float32, float64 and bfloat16");
}

int64_t number_of(const std::string& cell) {
  char message[256];
  raglane_cell_facts facts;
  for (int64_t number = 0; raglane_describe_cell(number, &facts, message, sizeof message) == RAGLANE_OK; number++)
    if (cell == facts.name) return number;
  refuse("there is no cell " + cell);
}

// Output (N, K * P), final h (K, B, P), final c (K, B, H), which is empty for cells without c.
std::tuple<Tensor, Tensor, Tensor> layer(std::string cell, Tensor values, Tensor offsets, Tensor h,
                                         std::optional<Tensor> c, Parts weights) {
  if (values.dim() != 2 || offsets.dim() != 1 || offsets.sizes()[0] < 1 || h.dim() != 3 || (c.has_value() && c->dim() != 3))
    refuse("values (N, D), offsets (B + 1), h (K, B, P) and c (K, B, H) are required");
  const int64_t state = h.sizes()[2];
  const bool projects = weights.size() % 5 == 0 && weights.size() > 4 && weights[4].has_value() && weights[4]->dim() == 2;
  const int64_t hidden = c.has_value() ? c->sizes()[2] : projects ? weights[4]->sizes()[1] : state;
  raglane_layer call;
  std::memset(&call, 0, sizeof call);
  call.abi = RAGLANE_ABI;
  call.isa = best_isa();
  call.cell = number_of(cell);
  call.dtype = number_of(values.scalar_type());
  call.threads = torch::stable::get_num_threads();
  call.directions = h.sizes()[0];
  call.input_size = values.sizes()[1];
  call.hidden_size = hidden;
  call.projection_size = projects ? state : 0;
  // Read only if gates are saved, which inference does not do; checked anyway.
  call.gate_stride = 4 * ((hidden + 15) / 16 * 16);
  Tensor head = empty({head_size}, ScalarType::Long);
  std::memcpy(head.data_ptr(), &call, sizeof(int64_t) * head_size);
  Parts parts = {h};
  if (c.has_value()) parts.push_back(c);
  parts.insert(parts.end(), weights.begin(), weights.end());
  auto results = run_forward(head, offsets, values, parts, {}, true, false, false);
  if (results.empty()) refuse("a tensor does not fit the layer");
  return {results[0], results[1], results.size() > 2 ? results[2] : empty(Shape(0), values.scalar_type())};
}

// Tensors whose numbers are not those of their memory: negative views, zeros that were never written, and wrappers.
template <auto function> struct Refused;
template <class Result, class... Args, Result (*function)(Args...)> struct Refused<function> {
  static Result call(Args...) {
    if constexpr (std::is_same_v<Result, std::vector<Tensor>>) return {};
    refuse("a tensor's numbers are not those of its memory");
  }
};
constexpr const char* refused[] = {"Negative", "ZeroTensor", "FuncTorchGradWrapper", "Python"};

// A second copy of this library in a process, such as that of a packaged model, registers nothing.
class Registration {
 public:
  Registration() {
    try {
      StableLibrary& names = add(StableLibrary::Kind::FRAGMENT, nullptr);
      names.def("forward(Tensor head, Tensor offsets, Tensor values, Tensor?[] parts, Tensor? packed, bool need_output,"
                " bool save, bool need_c) -> Tensor[]");
      names.def("backward(Tensor head, Tensor offsets, Tensor values, Tensor?[] parts, Tensor?[] saved, bool[] needed,"
                " bool over_gates, bool over_c) -> Tensor[]");
      names.def("run_program(Tensor code, Tensor offsets, Tensor[] inputs, Tensor?[] over, int isa, int flags,"
                " int threads, bool ascending) -> Tensor[]");
      names.def("layer(str cell, Tensor values, Tensor offsets, Tensor h, Tensor? c, Tensor?[] weights)"
                " -> (Tensor, Tensor, Tensor)");
      StableLibrary& cpu = add(StableLibrary::Kind::IMPL, "CPU");
      cpu.impl("forward", TORCH_BOX(&forward));
      cpu.impl("backward", TORCH_BOX(&backward));
      cpu.impl("run_program", TORCH_BOX(&program));
      cpu.impl("layer", TORCH_BOX(&layer));
      for (const char* key : refused) {
        StableLibrary& other = add(StableLibrary::Kind::IMPL, key);
        other.impl("forward", TORCH_BOX(&Refused<&forward>::call));
        other.impl("backward", TORCH_BOX(&Refused<&backward>::call));
        other.impl("run_program", TORCH_BOX(&Refused<&program>::call));
      }
      // Models reach this one by tracing too, whose tensors are wrappers.
      add(StableLibrary::Kind::IMPL, "Negative").impl("layer", TORCH_BOX(&Refused<&layer>::call));
    } catch (const std::exception&) {
      libraries_.clear();
    }
  }

 private:
  using StableLibrary = torch::stable::detail::StableLibrary;
  std::vector<std::unique_ptr<StableLibrary>> libraries_;

  StableLibrary& add(StableLibrary::Kind kind, const char* key) {
    return *libraries_.emplace_back(std::make_unique<StableLibrary>(kind, "raglane", key, __FILE__, __LINE__));
  }
} registration;

}  // namespace
