// The layers and programs of the kernels as operators of torch, in C++ from the arguments to the results.
//
// It uses only torch's stable ABI: the binary runs with torch 2.11 and every later version. `forward` and `backward` are
// called by kernels/cpu/layer.py, `stack` by kernels/cpu/backend.py, `run_program` by kernels/cpu/programs.py, and `layer` by models that AOTInductor
// compiled, without Python. All tensors are checked before the kernels get their addresses.
#include <new>

#include "layer.h"
#include "program.h"
#include "registration.h"

namespace raglane::operators {
namespace {

// `head` (18), int64: see head_size. Returns the output, if it is needed or saved; the final states; the gates, if saved;
// and c after each element, if needed or saved. With a layout other than FLAT, `values` and a needed output have it,
// `offsets` are the sizes of class Rows, and saved flat values, the flat output and places follow. Refuses a call of which
// the kernels cannot read a tensor.
std::vector<Tensor> run_forward(const Tensor& head, const Tensor& offsets, const Tensor& values, const Parts& parts,
                                const std::optional<Tensor>& packed, bool need_output, bool save, bool need_c,
                                const std::optional<Tensor>& order, int64_t layout) {
  std::optional<Rows> rows;
  if (layout != FLAT) rows.emplace(layout, values, offsets, order);
  if (rows && !rows->fits) refuse("the kernels cannot read the rows of a table");
  Layer layer(head, rows ? rows->offsets() : offsets, values, parts, packed.has_value(), rows ? &*rows : nullptr, save);
  raglane_layer& call = layer.call;
  std::vector<Tensor> results;
  if (packed.has_value()) {
    // The kernels compare its header with the call.
    const int64_t bytes = packed->numel();
    call.packed = layer.look(*packed, {bytes}, packed->scalar_type());
    layer.require_fit();
    if (packed->element_size() != 1 || bytes != layer.packed_bytes())
      refuse("packed must be the weights of this layer and instruction set, got others");
  }
  layer.require_fit();
  if (rows) {
    rows->threads = call.threads;
    rows->flatten(layer.flat ? layer.flat->data_ptr() : nullptr);
    if (!layer.flat) rows->lead(call);
  }
  results.reserve(8);
  if (need_output || save) call.output = layer.write(results, layer.of_output());
  call.final_h = layer.write(results, layer.of_state(0));
  if (layer.facts.has_c) call.final_c = layer.write(results, layer.of_state(1));
  if (save) call.gates = layer.keep(results, layer.of_gates());
  if (need_c) call.c_states = layer.write(results, layer.of_c_states());
  else if (save) call.c_states = layer.keep(results, layer.of_c_states());
  layer.run(raglane_forward);
  if (rows && save) results.insert(results.end(), {*layer.flat, results[0], *rows->places});
  if (rows && need_output && layer.flat) results[0] = rows->scatter(call.output, layer.of_output().sizes[1], layer.dtype);
  else if (rows && need_output) rows->fill(results[0]);
  return results;
}

// The same for a tensor of equal lengths in the order of flat values, for inference: with the batch first, or with one
// step or one sequence. `values` and the output are three-dimensional views of these.
std::vector<Tensor> run_even(const Tensor& head, const Tensor& values, const Parts& parts,
                             const std::optional<Tensor>& packed, bool need_output, bool is_time_first) {
  if (values.dim() != 3 || values.device().type() != DeviceType::CPU) refuse("values (B, T, D) or (T, B, D) are required");
  if (!has_all_numbers(values)) refuse("the storage of the values is too small");
  const int64_t first = values.sizes()[0], second = values.sizes()[1], width = values.sizes()[2];
  if (is_time_first && first != 1 && second != 1) refuse("one step or one sequence is required");
  const int64_t sequences = is_time_first ? second : first, steps = is_time_first ? first : second;
  Tensor offsets = empty({sequences + 1}, ScalarType::Long);
  auto* numbers = static_cast<int64_t*>(offsets.data_ptr());
  for (int64_t b = 0; b <= sequences; b++) numbers[b] = b * steps;
  const Tensor whole = values.is_contiguous() ? values : torch::stable::contiguous(values);
  std::vector<Tensor> results = run_forward(head, offsets, reshaped(whole, {first * second, width}), parts, packed,
                                            need_output, false, false, {}, FLAT);
  if (need_output) results[0] = reshaped(results[0], {first, second, results[0].sizes()[1]});
  return results;
}

// A call of any layout.
std::vector<Tensor> run_layout(const Tensor& head, const Tensor& offsets, const Tensor& values, const Parts& parts,
                               const std::optional<Tensor>& packed, bool need_output, bool save, bool need_c,
                               const std::optional<Tensor>& order, int64_t layout) {
  if (layout < EVEN_BATCH_FIRST)
    return run_forward(head, offsets, values, parts, packed, need_output, save, need_c, order, layout);
  if (save || need_c || layout > EVEN_TIME_FIRST) refuse("this layout is for inference alone");
  return run_even(head, values, parts, packed, need_output, layout == EVEN_TIME_FIRST);
}

// Some rows of a contiguous tensor.
Tensor rows_of(const Tensor& tensor, int64_t first, int64_t count) {
  std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  const auto strides = tensor.strides();
  sizes[0] = count;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), (int64_t)sizes.size(), sizes.data(), strides.data(),
                                                        first * strides[0], &handle));
  return Tensor(handle);
}

// The layers of a stack one after the other, for inference, each on the output of the one below. `states`: the initial
// ones of all layers (L * K, B, size), or none; `weights`: those of one layer after the other; `packed`: of each layer, or
// none. Returns the output of the last layer, if it is needed, and the final states of all layers.
std::vector<Tensor> run_stack(const std::vector<Tensor>& heads, const Tensor& offsets, const Tensor& values,
                              const std::vector<Tensor>& states, const Parts& weights, const std::vector<Tensor>& packed,
                              bool need_output, const std::optional<Tensor>& order, int64_t layout) {
  const size_t layers = heads.size();
  if (layers == 0 || weights.size() % layers != 0 || (!packed.empty() && packed.size() != layers))
    refuse("weights for each layer of the stack are required");
  const size_t each = weights.size() / layers;
  std::vector<Tensor> initial, finals, results;
  for (const Tensor& state : states) {
    if (state.dim() < 2 || state.dim() > 3 || state.sizes()[0] % (int64_t)layers != 0 ||
        state.device().type() != DeviceType::CPU || !has_all_numbers(state))
      refuse("states (L * K, B, size) are required");
    initial.push_back(state.is_contiguous() ? state : torch::stable::contiguous(state));
  }
  Tensor below = values;
  for (size_t layer = 0; layer < layers; layer++) {
    Parts parts;
    for (const Tensor& state : initial) {
      const int64_t rows = state.sizes()[0] / (int64_t)layers;
      parts.push_back(rows_of(state, (int64_t)layer * rows, rows));
    }
    parts.insert(parts.end(), weights.begin() + layer * each, weights.begin() + (layer + 1) * each);
    const std::optional<Tensor> ready = packed.empty() ? std::nullopt : std::optional(packed[layer]);
    const bool has_output = need_output || layer + 1 < layers;
    results = run_layout(heads[layer], offsets, below, parts, ready, has_output, false, false, order, layout);
    const size_t first = has_output ? 1 : 0, count = results.size() - first;
    for (size_t s = 0; s < count; s++) {
      const Tensor& state = results[first + s];
      const auto sizes = state.sizes();
      const int64_t rows = sizes[0] * (int64_t)layers, bytes = state.numel() * state.element_size();
      if (layer == 0)
        finals.push_back(empty(state.dim() == 2 ? Shape(rows, sizes[1]) : Shape(rows, sizes[1], sizes[2]), state.scalar_type()));
      if (s >= finals.size() || finals[s].numel() != state.numel() * (int64_t)layers ||
          finals[s].scalar_type() != state.scalar_type())
        refuse("the states of all layers must have the same sizes");
      if (bytes > 0) std::memcpy(static_cast<char*>(finals[s].data_ptr()) + layer * bytes, state.data_ptr(), bytes);
    }
    if (has_output) below = results[0];
  }
  if (need_output) finals.insert(finals.begin(), below);
  return finals;
}

// Gradients of the values and parts, those that are needed. `saved`: the output, gates and c of forward, then the
// gradients of the output, of c after each element and of the final states, or none for zeros. `over_gates` and `over_c`:
// the memory of saved gates and c may be overwritten. `in_layout`: `offsets` are the places of class Rows, and the
// gradients of output and values have the layout. `with_steps`: grad_gates and previous_h follow, unless they overwrite,
// then grad_h, unprojected and grad_skip, if the layer has them. Refuses calls as forward does.
std::vector<Tensor> run_backward(const Tensor& head, const Tensor& offsets, const Tensor& values, const Parts& parts,
                                 const Parts& saved, const std::vector<bool>& needed, bool over_gates, bool over_c,
                                 bool in_layout, bool with_steps) {
  std::optional<Rows> rows;
  if (in_layout) rows.emplace(offsets);
  if (rows && !rows->fits) refuse("the kernels cannot read the places of a table");
  Layer layer(head, rows ? rows->offsets() : offsets, values, parts);
  raglane_layer& call = layer.call;
  layer.require_fit();
  if (saved.size() != 7 || needed.size() != 1 + parts.size() || values.dim() != 2)
    refuse("seven saved tensors, and values (N, D), are required");
  // The rows are gathered and scattered by the places, and the other tensors have the shapes of the values.
  if (rows && rows->elements() != call.elements) refuse("the places of a table must be those of the values");
  const Shape of_output = layer.of_output(), of_gates = layer.of_gates(), of_c = layer.of_c_states();
  call.output = layer.read(saved[0], of_output);
  call.gates = layer.read(saved[1], of_gates);
  call.c_states = layer.read(saved[2], of_c);
  std::optional<Tensor> grad_output = saved[3];
  layer.require_fit();
  if (rows) rows->threads = call.threads;
  if (rows && grad_output) {
    grad_output = rows->gather(*saved[3], of_output, layer.dtype);
    layer.fits &= rows->fits;
  }
  call.grad_output = layer.read(grad_output, of_output);
  call.grad_c_states = layer.read(saved[4], of_c);
  call.grad_final_h = layer.read(saved[5], layer.of_state(0));
  call.grad_final_c = layer.read(saved[6], layer.of_state(1));
  layer.require_fit();
  // With recomputed gates these are in the kernels' scratch.
  const bool is_matrix = !layer.facts.is_elementwise;
  const int64_t k = call.directions, n = call.checkpoint_every ? 0 : call.elements, hidden = call.hidden_size;
  const Shape of_grads = is_matrix ? Shape(k, n, call.gate_stride)
                                   : Shape(k, n, (layer.facts.gates + (call.weights[0].skip != nullptr)) * hidden);
  std::vector<Tensor> steps, results;
  call.grad_gates = over_gates && of_gates.sizes[2] ? call.gates : layer.keep(steps, of_grads);
  if (is_matrix) {
    call.previous_h = over_c ? call.c_states : layer.keep(steps, {k, n, layer.state_size()});
    if (call.projection_size) {
      call.grad_h = layer.keep(steps, {k, n, call.projection_size});
      call.unprojected = layer.keep(steps, {k, n, hidden});
    }
  } else if (layer.facts.skips && !call.weights[0].skip) {
    call.grad_skip = layer.keep(steps, {k, n, hidden});
  }
  results.reserve(needed.size() + steps.size());
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
  if (rows && needed[0]) try {
    results[0] = rows->scatter(call.grad_values, call.input_size, layer.dtype);
  } catch (const Refusal& refusal) {
    throw Refusal(refusal.reason, refusal.status == RAGLANE_BAD_ARGUMENT ? spent : refusal.status);
  }
  if (with_steps) results.insert(results.end(), steps.begin(), steps.end());
  return results;
}

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

// The answer of a call, which throws nothing.
template <class Call> Answer answer(Call&& call) {
  try {
    return {call(), RAGLANE_OK, {}};
  } catch (const Refusal& refusal) {
    return {{}, refusal.status, refusal.reason};
  } catch (const std::bad_alloc&) {
    return {{}, RAGLANE_OUT_OF_MEMORY, "not enough memory for the call"};
  } catch (const std::exception& error) {
    return {{}, RAGLANE_BAD_ARGUMENT, error.what()};
  }
}

Answer forward(Tensor head, Tensor offsets, Tensor values, Parts parts, std::optional<Tensor> packed, bool need_output,
               bool save, bool need_c, std::optional<Tensor> order, int64_t layout) {
  return answer([&] { return run_layout(head, offsets, values, parts, packed, need_output, save, need_c, order, layout); });
}

Answer stack(std::vector<Tensor> heads, Tensor offsets, Tensor values, std::vector<Tensor> states, Parts weights,
             std::vector<Tensor> packed, bool need_output, std::optional<Tensor> order, int64_t layout) {
  return answer([&] { return run_stack(heads, offsets, values, states, weights, packed, need_output, order, layout); });
}

Answer backward(Tensor head, Tensor offsets, Tensor values, Parts parts, Parts saved, std::vector<bool> needed,
                bool over_gates, bool over_c, bool in_layout, bool with_steps) {
  return answer([&] {
    return run_backward(head, offsets, values, parts, saved, needed, over_gates, over_c, in_layout, with_steps);
  });
}

// Python reports the errors, of a call of its own.
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
  std::memcpy(head.data_ptr(), &call, sizeof(int64_t) * field_count);
  static_cast<int64_t*>(head.data_ptr())[field_count] = INT64_MAX;  // nothing is saved
  Parts parts = {h};
  if (c.has_value()) parts.push_back(c);
  parts.insert(parts.end(), weights.begin(), weights.end());
  auto results = run_forward(head, offsets, values, parts, {}, true, false, false, {}, FLAT);
  return {results[0], results[1], results.size() > 2 ? results[2] : empty(Shape(0), values.scalar_type())};
}

const Registration registration([](Registration& to) {
  auto& names = to.names();
  names.def("forward(Tensor head, Tensor offsets, Tensor values, Tensor?[] parts, Tensor? packed, bool need_output,"
            " bool save, bool need_c, Tensor? order, int layout) -> (Tensor[], int, str?)");
  names.def("backward(Tensor head, Tensor offsets, Tensor values, Tensor?[] parts, Tensor?[] saved, bool[] needed,"
            " bool over_gates, bool over_c, bool in_layout, bool with_steps) -> (Tensor[], int, str?)");
  names.def("stack(Tensor[] heads, Tensor offsets, Tensor values, Tensor[] states, Tensor?[] weights, Tensor[] packed,"
            " bool need_output, Tensor? order, int layout) -> (Tensor[], int, str?)");
  names.def("run_program(Tensor code, Tensor offsets, Tensor[] inputs, Tensor?[] over, int isa, int flags,"
            " int threads, bool ascending) -> Tensor[]");
  names.def("layer(str cell, Tensor values, Tensor offsets, Tensor h, Tensor? c, Tensor?[] weights)"
            " -> (Tensor, Tensor, Tensor)");
  auto& cpu = to.of("CPU");
  cpu.impl("forward", TORCH_BOX(&forward));
  cpu.impl("backward", TORCH_BOX(&backward));
  cpu.impl("stack", TORCH_BOX(&stack));
  cpu.impl("run_program", TORCH_BOX(&program));
  cpu.impl("layer", TORCH_BOX(&layer));
  for (const char* key : refused) {
    auto& other = to.of(key);
    other.impl("forward", TORCH_BOX(&Refused<&forward>::call));
    other.impl("backward", TORCH_BOX(&Refused<&backward>::call));
    other.impl("stack", TORCH_BOX(&Refused<&stack>::call));
    other.impl("run_program", TORCH_BOX(&Refused<&program>::call));
  }
  // Models reach this one by tracing too, whose tensors are wrappers.
  to.of("Negative").impl("layer", TORCH_BOX(&Refused<&layer>::call));
});

}  // namespace
}  // namespace raglane::operators
