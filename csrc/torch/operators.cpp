// The layers and programs of the kernels as operators of torch, in C++ from the arguments to the results.
//
// It uses only torch's stable ABI: the binary runs with torch 2.11 and every later version. `forward` and `backward` are
// called by kernels/cpu/layer.py, `infer` and `infer_packed` by kernels/cpu/backend.py, `run_program` by
// kernels/cpu/programs.py, and `layer` by models that AOTInductor compiled, without Python. All tensors are checked before
// the kernels get their addresses.
#include <new>

#include "layer.h"
#include "program.h"
#include "registration.h"

namespace raglane::operators {
namespace {

// Let a layer read packed weights.
void set_packed(Layer& layer, const Tensor& packed) {
  // The kernels compare its header with the call.
  const int64_t bytes = packed.numel();
  layer.call.packed = layer.look(packed, {bytes}, packed.scalar_type());
  layer.require_fit();
  if (packed.element_size() != 1 || bytes != layer.packed_bytes())
    refuse("packed must be the weights of this layer and instruction set, got others");
}

// The final states, after the output, if it is needed.
void write_results(Layer& layer, std::vector<Tensor>& results, bool need_output) {
  raglane_layer& call = layer.call;
  if (need_output) call.output = layer.write(results, layer.of_output());
  call.final_h = layer.write(results, layer.of_state(0));
  if (layer.facts.has_c) call.final_c = layer.write(results, layer.of_state(1));
}

// `fields`: see head_size. Returns the output, if it is needed or saved; the final states; the gates, if saved; and c after
// each element, if needed or saved. With a layout other than FLAT, `values` and a needed output have it, `offsets` are the
// sizes of class Rows, and saved flat values, the flat output and places follow. Refuses a call of which the kernels cannot
// read a tensor.
std::vector<Tensor> run_forward(const int64_t* fields, const Tensor& offsets, const Tensor& values, const Parts& parts,
                                const std::optional<Tensor>& packed, bool need_output, bool save, bool need_c,
                                const std::optional<Tensor>& order, int64_t layout) {
  std::optional<Rows> rows;
  if (layout != FLAT) rows.emplace(layout, values, offsets, order);
  if (rows && !rows->fits) refuse("the kernels cannot read the rows of a table");
  Layer layer(fields, rows ? rows->offsets() : offsets, values, parts, packed.has_value(), rows ? &*rows : nullptr, save);
  raglane_layer& call = layer.call;
  std::vector<Tensor> results;
  if (packed.has_value()) set_packed(layer, *packed);
  layer.require_fit();
  if (rows) {
    rows->threads = call.threads;
    rows->flatten(layer.flat ? layer.flat->data_ptr() : nullptr);
    if (!layer.flat) rows->lead(call);
  }
  results.reserve(8);
  write_results(layer, results, need_output || save);
  if (save) call.gates = layer.keep(results, layer.of_gates());
  if (need_c) call.c_states = layer.write(results, layer.of_c_states());
  else if (save) call.c_states = layer.keep(results, layer.of_c_states());
  layer.run(raglane_forward);
  if (rows && save) results.insert(results.end(), {*layer.flat, results[0], *rows->places});
  if (rows && need_output && layer.flat) results[0] = rows->scatter(call.output, layer.of_output().sizes[1], layer.dtype);
  else if (rows && need_output) rows->fill(results[0]);
  return results;
}

// Sequences of equal lengths in a tensor that has the order of flat values.
class Even {
 public:
  Even(const Tensor& values, int64_t layout) {
    const int64_t dims = values.dim(), *sizes = values.sizes().data();
    const bool has_steps = layout == STEP && (dims == 1 || dims == 2), is_one = layout == ONE && dims == 2;
    if (!has_steps && !is_one && (layout > EVEN_TIME_FIRST || dims != 3))
      refuse("values (B, T, D) or (T, B, D), steps (B, D) or (D), or one sequence (T, D) are required");
    if (layout == EVEN_TIME_FIRST && sizes[0] != 1 && sizes[1] != 1) refuse("one step or one sequence is required");
    int64_t count = 1, steps = 1;
    if (has_steps) count = dims == 2 ? sizes[0] : 1;
    else if (is_one) steps = sizes[0];
    else count = sizes[layout == EVEN_TIME_FIRST ? 1 : 0], steps = sizes[layout == EVEN_TIME_FIRST ? 0 : 1];
    int64_t* offsets = few_;
    if (count >= most_few) many_.resize(count + 1), offsets = many_.data();
    for (int64_t b = 0; b <= count; b++) offsets[b] = b * steps;
    const Shape lead = dims == 1 ? Shape() : dims == 2 ? Shape(sizes[0]) : Shape(sizes[0], sizes[1]);
    sequences = {offsets, count, count * steps, lead, !is_one && dims > 1};
  }
  Even(const Even&) = delete;

  Sequences sequences;

 private:
  static constexpr int64_t most_few = 64;
  int64_t few_[most_few];
  std::vector<int64_t> many_;
};

// One layer, for inference; `packed` may be null.
std::vector<Tensor> run_inference(const int64_t* fields, const std::optional<Tensor>& sizes, const Tensor& values,
                                  const Parts& parts, const Tensor* packed, bool need_output,
                                  const std::optional<Tensor>& order, int64_t layout) {
  if (layout < EVEN_BATCH_FIRST) {
    if (!sizes.has_value()) refuse("offsets, lengths or batch sizes are required");
    const std::optional<Tensor> ready = packed ? std::optional(*packed) : std::nullopt;
    return run_forward(fields, *sizes, values, parts, ready, need_output, false, false, order, layout);
  }
  const Even even(values, layout);
  Layer layer(fields, even.sequences, values, parts, packed != nullptr);
  if (packed) set_packed(layer, *packed);
  layer.require_fit();
  std::vector<Tensor> results;
  results.reserve(3);
  write_results(layer, results, need_output);
  layer.run(raglane_forward);
  return results;
}

// The initial states of a call: `c` is missing in one of a cell without it, and both in one without initial states.
Parts states_of(const std::optional<Tensor>& h, const std::optional<Tensor>& c, size_t more = 0) {
  Parts states;
  states.reserve(2 + more);
  if (h.has_value()) states.push_back(h);
  if (c.has_value()) states.push_back(c);
  return states;
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

// The layers of a stack one after the other, for inference, each on the output of the one below. `heads`: the integers of
// all layers; `h` and `c`: the initial states of all layers (L * K, B, size), or none; `weights`: those of one layer after
// the other, or the packed ones of each. `sizes`: the offsets, or what class Rows reads, or none for equal lengths. Returns
// the output of the last layer, if it is needed, and the final states of all.
std::vector<Tensor> run_stack(const Tensor& heads, const std::optional<Tensor>& sizes, const Tensor& values,
                              const std::optional<Tensor>& h, const std::optional<Tensor>& c, const Parts& weights,
                              bool are_packed, bool need_output, const std::optional<Tensor>& order, int64_t layout) {
  const size_t layers = heads.numel() / head_size;
  const int64_t* fields = fields_of(heads, (int64_t)layers);
  if (layers == 0 || weights.size() % layers != 0 || (are_packed && weights.size() != layers))
    refuse("weights for each layer of the stack are required");
  const auto packed_of = [&](size_t layer) {
    if (are_packed && !weights[layer].has_value()) refuse("packed weights for each layer are required");
    return are_packed ? &*weights[layer] : nullptr;
  };
  const size_t each = are_packed ? 0 : weights.size() / layers;
  if (layers == 1) {
    Parts parts = states_of(h, c, each);
    parts.insert(parts.end(), weights.begin(), weights.begin() + each);
    return run_inference(fields, sizes, values, parts, packed_of(0), need_output, order, layout);
  }
  std::vector<Tensor> initial, finals, results;
  for (const std::optional<Tensor>& given : states_of(h, c)) {
    const Tensor& state = *given;
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
    const bool has_output = need_output || layer + 1 < layers;
    results = run_inference(fields + layer * head_size, sizes, below, parts, packed_of(layer), has_output, order, layout);
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
  Layer layer(fields_of(head, 1), rows ? rows->offsets() : offsets, values, parts);
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
// elements, sequences, states, vectors and weights. Refuses a call of which the kernels cannot read a tensor.
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
  return answer([&] { 
    return run_forward(fields_of(head, 1), offsets, values, parts, packed, need_output, save, need_c, order, layout);
  });
}

// No results if a call in inference is refused, which then goes another way, whatever the reason.
std::vector<Tensor> infer(Tensor heads, std::optional<Tensor> sizes, Tensor values, std::optional<Tensor> h,
                          std::optional<Tensor> c, Parts weights, bool are_packed, bool need_output,
                          std::optional<Tensor> order, int64_t layout) try {
  return run_stack(heads, sizes, values, h, c, weights, are_packed, need_output, order, layout);
} catch (const std::exception&) {
  return {};
}

// The same for one layer with packed weights: few arguments and no list, because torch takes longer to convert them than the
// kernels need for a step.
std::vector<Tensor> infer_packed(Tensor head, Tensor packed, std::optional<Tensor> sizes, Tensor values,
                                 std::optional<Tensor> h, std::optional<Tensor> c, bool need_output, int64_t layout) try {
  return run_inference(fields_of(head, 1), sizes, values, states_of(h, c), &packed, need_output, {}, layout);
} catch (const std::exception&) {
  return {};
}

Answer backward(Tensor head, Tensor offsets, Tensor values, Parts parts, Parts saved, std::vector<bool> needed,
                bool over_gates, bool over_c, bool in_layout, bool with_steps) {
  return answer([&] {
    return run_backward(head, offsets, values, parts, saved, needed, over_gates, over_c, in_layout, with_steps);
  });
}

Answer program(Tensor code, Tensor offsets, std::vector<Tensor> inputs, Parts over, int64_t isa,
                            int64_t flags, int64_t threads, bool ascending) {
  return answer([&] { return run_program(code, offsets, inputs, over, isa, flags, threads, ascending); });
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
  int64_t fields[head_size];
  std::memcpy(fields, &call, sizeof(int64_t) * field_count);
  fields[field_count] = INT64_MAX;  // nothing is saved
  Parts parts = {h};
  if (c.has_value()) parts.push_back(c);
  parts.insert(parts.end(), weights.begin(), weights.end());
  auto results = run_forward(fields, offsets, values, parts, {}, true, false, false, {}, FLAT);
  return {results[0], results[1], results.size() > 2 ? results[2] : empty(Shape(0), values.scalar_type())};
}

const Registration registration([](Registration& to) {
  auto& names = to.names();
  names.def("forward(Tensor head, Tensor offsets, Tensor values, Tensor?[] parts, Tensor? packed, bool need_output,"
            " bool save, bool need_c, Tensor? order, int layout) -> (Tensor[], int, str?)");
  names.def("backward(Tensor head, Tensor offsets, Tensor values, Tensor?[] parts, Tensor?[] saved, bool[] needed,"
            " bool over_gates, bool over_c, bool in_layout, bool with_steps) -> (Tensor[], int, str?)");
  names.def("infer(Tensor heads, Tensor? sizes, Tensor values, Tensor? h, Tensor? c, Tensor?[] weights, bool are_packed,"
            " bool need_output, Tensor? order, int layout) -> Tensor[]");
  names.def("infer_packed(Tensor head, Tensor packed, Tensor? sizes, Tensor values, Tensor? h, Tensor? c,"
            " bool need_output, int layout) -> Tensor[]");
  names.def("run_program(Tensor code, Tensor offsets, Tensor[] inputs, Tensor?[] over, int isa, int flags,"
            " int threads, bool ascending) -> (Tensor[], int, str?)");
  names.def("layer(str cell, Tensor values, Tensor offsets, Tensor h, Tensor? c, Tensor?[] weights)"
            " -> (Tensor, Tensor, Tensor)");
  auto& cpu = to.of("CPU");
  cpu.impl("forward", TORCH_BOX(&forward));
  cpu.impl("backward", TORCH_BOX(&backward));
  cpu.impl("infer", TORCH_BOX(&infer));
  cpu.impl("infer_packed", TORCH_BOX(&infer_packed));
  cpu.impl("run_program", TORCH_BOX(&program));
  cpu.impl("layer", TORCH_BOX(&layer));
  for (const char* key : refused) {
    auto& other = to.of(key);
    other.impl("forward", TORCH_BOX(&Refused<&forward>::call));
    other.impl("backward", TORCH_BOX(&Refused<&backward>::call));
    other.impl("infer", TORCH_BOX(&Refused<&infer>::call));
    other.impl("infer_packed", TORCH_BOX(&Refused<&infer_packed>::call));
    other.impl("run_program", TORCH_BOX(&Refused<&program>::call));
  }
  for (const char* key : changed) {
    auto& other = to.of(key);
    other.impl("infer", TORCH_BOX(&Refused<&infer>::call));
    other.impl("infer_packed", TORCH_BOX(&Refused<&infer_packed>::call));
  }
  // Models reach this one by tracing too, whose tensors are wrappers.
  to.of("Negative").impl("layer", TORCH_BOX(&Refused<&layer>::call));
});

}  // namespace
}  // namespace raglane::operators
