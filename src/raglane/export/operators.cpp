// A layer of the CPU kernels as an operator of torch without Python, for models compiled by AOTInductor.
//
// It uses only torch's stable ABI: the binary runs with torch 2.11 and every later version. raglane.export.aot builds
// it. All arguments are checked before the kernels get their addresses.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "raglane.h"

namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::vector<int64_t>;
using Weights = std::vector<std::optional<Tensor>>;

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("raglane::layer: " + what); }

// The address of a valid tensor, which must be contiguous (contiguous_of).
void* checked(const char* name, const Tensor& tensor, const Shape& shape, ScalarType dtype) {
  const auto sizes = tensor.sizes();
  bool same = sizes.size() == shape.size() && tensor.scalar_type() == dtype && tensor.device().type() == DeviceType::CPU;
  for (size_t place = 0; same && place < shape.size(); place++) same = sizes[place] == shape[place];
  if (!same || !tensor.is_contiguous()) refuse(std::string(name) + " does not fit the layer");
  return tensor.data_ptr();
}

Tensor contiguous_of(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

raglane_cell_facts facts_of(const std::string& name, int64_t& number) {
  char message[256];
  raglane_cell_facts facts;
  for (number = 0; raglane_describe_cell(number, &facts, message, sizeof message) == RAGLANE_OK; number++)
    if (name == facts.name) return facts;
  refuse("there is no cell " + name);
}

int64_t number_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return RAGLANE_FLOAT32;
  if (dtype == ScalarType::Double) return RAGLANE_FLOAT64;
  if (dtype == ScalarType::BFloat16) return RAGLANE_BFLOAT16;
  refuse("the kernels compute in float32, float64 and bfloat16");
}

int64_t best_isa() {
  int64_t best = 0;
  for (int64_t isa = 0; raglane_isa_name(isa); isa++)
    if (raglane_has_isa(isa)) best = isa;
  return best;
}

void require_ok(int32_t status, const char* message) {
  if (status != RAGLANE_OK) refuse(message);
}

// The fields that both kinds of layers share.
raglane_layer call_of(int64_t cell, const Tensor& values, const Tensor& offsets, int64_t directions, int64_t hidden) {
  raglane_layer call;
  std::memset(&call, 0, sizeof call);
  call.abi = RAGLANE_ABI;
  call.isa = best_isa();
  call.cell = cell;
  call.dtype = number_of(values.scalar_type());
  call.threads = torch::stable::get_num_threads();
  call.directions = directions;
  call.sequences = offsets.sizes()[0] - 1;
  call.elements = values.sizes()[0];
  call.input_size = values.sizes()[1];
  call.hidden_size = hidden;
  call.offsets = static_cast<const int64_t*>(checked("offsets", offsets, {offsets.sizes()[0]}, ScalarType::Long));
  call.values = checked("values", values, {call.elements, call.input_size}, values.scalar_type());
  return call;
}

// The tensors of one call, with checked addresses.
struct Layer {
  raglane_cell_facts facts;
  ScalarType dtype;
  Weights weights;
  size_t each;

  const void* weight(int64_t direction, size_t place, const Shape& shape, bool optional) const {
    const auto& part = weights[direction * each + place];
    if (!part.has_value()) {
      if (!optional) refuse("a weight is missing");
      return nullptr;
    }
    return checked("a weight", *part, shape, dtype);
  }

  void fill(raglane_layer& call, int64_t state) const {
    if (facts.is_elementwise) return fill_elementwise(call);
    const int64_t rows = facts.gates * call.hidden_size, input = call.input_size;
    call.projection_size = weights[4].has_value() ? state : 0;
    if (!call.projection_size && state != call.hidden_size) refuse("a projection is missing");
    // Read only if gates are saved, which inference does not do; checked anyway.
    call.gate_stride = facts.slots * ((call.hidden_size + 15) / 16 * 16);
    for (int64_t k = 0; k < call.directions; k++)
      call.weights[k] = {weight(k, 0, {rows, input}, false), weight(k, 1, {rows, state}, false),
                         weight(k, 2, {rows}, true), weight(k, 3, {rows}, true),
                         weight(k, 4, {state, call.hidden_size}, !call.projection_size), nullptr};
  }

  void fill_elementwise(raglane_layer& call) const {
    const int64_t hidden = call.hidden_size, input = call.input_size;
    const bool skips = facts.skips && input != hidden;
    for (int64_t k = 0; k < call.directions; k++) {
      call.weights[k] = {weight(k, 0, {facts.gates * hidden, input}, false),
                         weight(k, 1, {facts.factors * hidden}, !facts.factors),
                         weight(k, 2, {facts.biases * hidden}, true), nullptr, nullptr,
                         weight(k, 3, {hidden, input}, !skips)};
      if (!facts.factors && call.weights[k].hidden) refuse("a weight that the cell does not have");
      if (!skips && call.weights[k].skip) refuse("a weight that the cell does not have");
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> run(const Layer& layer, int64_t cell, const Tensor& values, const Tensor& offsets,
                                       const Tensor& h, const std::optional<Tensor>& c) {
  const int64_t directions = h.sizes()[0], state = h.sizes()[2];
  const int64_t hidden = c.has_value() ? c->sizes()[2] : layer.facts.projects && layer.weights[4].has_value()
                                                             ? layer.weights[4]->sizes()[1]
                                                             : state;
  raglane_layer call = call_of(cell, values, offsets, directions, hidden);
  layer.fill(call, state);
  const Shape of_h = {directions, call.sequences, state}, of_c = {directions, call.sequences, hidden};
  call.initial_h = checked("h", h, of_h, layer.dtype);
  Tensor output = torch::stable::new_empty(values, std::vector<int64_t>{call.elements, directions * state});
  Tensor final_h = torch::stable::new_empty(values, of_h);
  Tensor final_c = torch::stable::new_empty(values, c.has_value() ? of_c : Shape{0});
  if (c.has_value()) {
    call.initial_c = checked("c", *c, of_c, layer.dtype);
    call.final_c = final_c.data_ptr();
  }
  call.output = output.data_ptr();
  call.final_h = final_h.data_ptr();
  char message[256] = "";
  require_ok(raglane_forward(&call, message, sizeof message), message);
  return {output, final_h, final_c};
}

// Output (N, K * P), final h (K, B, P), final c (K, B, H), which is empty for cells without c.
std::tuple<Tensor, Tensor, Tensor> layer(std::string cell, Tensor values, Tensor offsets, Tensor h,
                                         std::optional<Tensor> c, Weights weights) {
  if (raglane_abi() != RAGLANE_ABI) refuse("the kernels are of another version; build the operators anew");
  int64_t number;
  const raglane_cell_facts facts = facts_of(cell, number);
  if (values.dim() != 2 || offsets.dim() != 1 || offsets.sizes()[0] < 1 || h.dim() != 3)
    refuse("values (N, D), offsets (B + 1), h (K, B, P) are wanted");
  const int64_t directions = h.sizes()[0];
  const size_t each = facts.is_elementwise ? 4 : 5;
  if (directions < 1 || directions > 2 || weights.size() != directions * each) refuse("weights for each direction");
  if (c.has_value() != (facts.has_c != 0) || (c.has_value() && c->dim() != 3)) refuse("c (K, B, H) where the cell has it");
  if (!facts.is_elementwise && !facts.projects && weights[4].has_value()) refuse("the cell has no projection");
  for (auto& part : weights)
    if (part.has_value()) part = contiguous_of(*part);
  if (c.has_value()) c = contiguous_of(*c);
  if (weights.size() > 4 && weights[4].has_value() && weights[4]->dim() != 2) refuse("a projection (P, H)");
  values = contiguous_of(values), offsets = contiguous_of(offsets), h = contiguous_of(h);
  const Layer parts{facts, values.scalar_type(), weights, each};
  return run(parts, number, values, offsets, h, c);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(raglane, m) {
  m.def("layer(str cell, Tensor values, Tensor offsets, Tensor h, Tensor? c, Tensor?[] weights)"
        " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(raglane, CPU, m) { m.impl("layer", TORCH_BOX(&layer)); }
