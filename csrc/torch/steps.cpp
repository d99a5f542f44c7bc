// Steps of blocks as operators of torch; see operators.cpp. kernels/cpu/steps.py calls them.
#include "registration.h"

namespace raglane::operators {
namespace {

// What steps share. The first two dimensions of rows are (B) or (B, 1).
template <class Call> class Step : public Held {
 public:
  Call call{};

  Tensor output(bool is_batch, int64_t columns) {
    std::vector<Tensor> results;
    call.output = write(results, is_batch ? Shape(call.rows, 1, columns) : Shape(call.rows, columns));
    return results[0];
  }

 protected:
  Step(const Tensor& rows, int64_t isa, int64_t flags) {
    dtype = rows.scalar_type();
    fits = (dtype == ScalarType::Float || dtype == ScalarType::Double) && rows.dim() >= 2 && rows.dim() <= 3;
    if (!fits) return;
    poisons = flags & RAGLANE_POISON;
    call.abi = RAGLANE_ABI, call.isa = isa, call.flags = flags;
    call.dtype = dtype == ScalarType::Double ? RAGLANE_FLOAT64 : RAGLANE_FLOAT32;
    call.rows = rows.size(0);
    held_.reserve(20);
  }

  void* read(const std::optional<Tensor>& part, const Shape& shape) {
    if (!part.has_value() || !fits || !is_like(*part, shape, dtype)) return nullptr;
    fits = part->is_contiguous();
    return fits ? hold(*part, shape, Strides(shape).of) : nullptr;
  }

  // Rows that are apart.
  void* read_rows(const Tensor& rows, int64_t columns, int64_t* stride) {
    const Shape shape = rows.dim() == 2 ? Shape(call.rows, columns) : Shape(call.rows, 1, columns);
    if (!fits || !is_like(rows, shape, dtype)) return nullptr;
    fits = columns == 1 || rows.stride(rows.dim() - 1) == 1;
    *stride = rows.stride(0);
    const int64_t strides[] = {*stride, 1};
    return fits ? hold(rows, Shape(call.rows, columns), strides) : nullptr;
  }

  // The state of a convolution: inputs of a channel one after the other, or channels of an input.
  void read_earlier(const Tensor& earlier, int64_t channels) {
    const int64_t kept = call.kept;
    const Shape shape(call.rows, channels, kept);
    if (!fits || !is_like(earlier, shape, dtype)) return;
    const bool by_channel = earlier.is_contiguous();
    call.row_stride = channels * kept;
    call.channel_stride = by_channel ? kept : 1, call.tap_stride = by_channel ? 1 : channels;
    const int64_t strides[] = {call.row_stride, call.channel_stride, call.tap_stride};
    for (int place = 0; place < 3; place++)
      fits = fits && (by_channel || earlier.size(place) == 1 || earlier.stride(place) == strides[place]);
    if (fits) call.earlier = hold(earlier, shape, strides);
  }
};

class OfMamba : public Step<raglane_mamba_step> {
 public:
  OfMamba(const Tensor& x, const Tensor& earlier, const Tensor& state, const Parts& parts, double norm_eps, double eps,
          bool logarithms, bool residual, bool ordered, int64_t isa, int64_t flags)
      : Step(x, isa, flags) {
    fits = fits && parts.size() == 15 && earlier.dim() == 3 && state.dim() == 3;
    for (size_t place : {0, 2, 4, 5, 7, 9}) fits = fits && parts[place].has_value() && parts[place]->dim() >= 2;
    if (!fits) return;
    call.norm_eps = norm_eps, call.eps = eps, call.logarithms = logarithms, call.residual = residual;
    call.ordered = ordered;
    call.inputs = x.size(x.dim() - 1), call.outputs = parts[9]->size(0);
    call.channels = parts[7]->size(0), call.states = parts[7]->size(1), call.rank = parts[5]->size(1);
    call.taps = parts[2]->size(parts[2]->dim() - 1), call.kept = earlier.size(2);
    const int64_t channels = call.channels, states = call.states;
    call.x = read(x, x.dim() == 2 ? Shape(call.rows, call.inputs) : Shape(call.rows, 1, call.inputs));
    call.in_weight = read(parts[0], {2 * channels, call.inputs}), call.in_bias = read(parts[1], {2 * channels});
    call.conv_weight = read(parts[2], {channels, 1, call.taps}), call.conv_bias = read(parts[3], {channels});
    call.x_weight = read(parts[4], {call.rank + 2 * states, channels});
    call.dt_weight = read(parts[5], {channels, call.rank}), call.dt_bias = read(parts[6], {channels});
    call.A = read(parts[7], {channels, states}), call.D = read(parts[8], {channels});
    call.out_weight = read(parts[9], {call.outputs, channels}), call.out_bias = read(parts[10], {call.outputs});
    call.dt_norm = read(parts[11], {call.rank});
    call.B_norm = read(parts[12], {states}), call.C_norm = read(parts[13], {states});
    call.norm = read(parts[14], {call.inputs});
    call.state = read(state, {call.rows, channels, states});
    read_earlier(earlier, channels);
  }
};

class OfAttention : public Step<raglane_attention_step> {
 public:
  OfAttention(const Tensor& mixed, const Tensor& gate, const Tensor& dt, const std::optional<Tensor>& beta,
              const Tensor& earlier, const Tensor& state, const Parts& parts, const std::vector<int64_t>& sizes,
              const std::vector<double>& numbers, int64_t isa, int64_t flags)
      : Step(mixed, isa, flags) {
    fits = fits && parts.size() == 6 && sizes.size() == 12 && numbers.size() == 5 && earlier.dim() == 3;
    for (size_t place : {0, 2, 3, 5}) fits = fits && parts[place].has_value() && parts[place]->dim() >= 1;
    if (!fits) return;
    call.key_heads = sizes[0], call.heads = sizes[1], call.key_size = sizes[2], call.value_size = sizes[3];
    call.q_first = sizes[4], call.k_first = sizes[5], call.v_first = sizes[6], call.unit = sizes[7];
    call.delta = sizes[8], call.gates_first = sizes[9], call.transposed = sizes[10], call.norm_groups = sizes[11];
    call.scale = numbers[0], call.beta_scale = numbers[1], call.least_dt = numbers[2], call.most_dt = numbers[3];
    call.norm_eps = numbers[4];
    call.taps = parts[0]->size(parts[0]->dim() - 1), call.kept = earlier.size(2);
    const int64_t heads = call.heads, keys = call.key_size, values = call.value_size;
    const int64_t channels = 2 * call.key_heads * keys + heads * values;
    call.mixed = read_rows(mixed, channels, &call.mixed_stride);
    call.gate = read_rows(gate, heads * values, &call.gate_stride);
    call.dt = read_rows(dt, heads, &call.dt_stride);
    if (beta.has_value()) call.beta = read_rows(*beta, heads, &call.beta_stride);
    call.conv_weight = read(parts[0], {channels, 1, call.taps}), call.conv_bias = read(parts[1], {channels});
    call.dt_bias = read(parts[2], {heads}), call.A = read(parts[3], {heads}), call.D = read(parts[4], {heads});
    call.norm_size = parts[5]->numel(), call.norm = read(parts[5], {call.norm_size});
    const int64_t shape[] = {call.rows, heads, call.transposed ? values : keys, call.transposed ? keys : values};
    fits = fits && state.dim() == 4 && state.scalar_type() == dtype && state.is_contiguous() &&
           state.device().type() == DeviceType::CPU;
    for (int place = 0; place < 4; place++) fits = fits && state.size(place) == shape[place];
    const Shape flat(call.rows, heads, keys * values);
    if (fits) call.state = hold(state, flat, Strides(flat).of);
    read_earlier(earlier, channels);
  }
};

// A step of a block by its operations, with the states after it in new tensors.
class OfBlock : public Step<raglane_block_step> {
 public:
  // The numbers of an operation in `code`: its kind to e of the struct, and the places of its weight and bias among the parts
  // and of its first state; low and high in `limits`.
  static constexpr size_t words = 15;

  OfBlock(const Tensor& x, const std::vector<Tensor>& states, const Parts& parts, const std::vector<int64_t>& code,
          const std::vector<double>& limits, const std::vector<int64_t>& sizes, int64_t isa, int64_t flags)
      : Step(x, isa, flags), states_(states), parts_(parts) {
    const size_t count = code.size() / words;
    fits = fits && call.rows > 0 && sizes.size() == 3 && code.size() == count * words && limits.size() == 2 * count;
    for (const int64_t number : code) fits = fits && number >= -1 && number <= 1 << 20;
    if (!fits) return;
    call.columns = sizes[0], call.first = sizes[1], call.outputs = sizes[2];
    call.inputs = x.size(x.dim() - 1);
    call.x = read(x, x.dim() == 2 ? Shape(call.rows, call.inputs) : Shape(call.rows, 1, call.inputs));
    for (const Tensor& state : states) next_.push_back(write(results_, Shape(call.rows, state.numel() / call.rows)));
    for (size_t i = 0; fits && i < count; i++) add(&code[i * words], &limits[2 * i]);
    call.operations = list_.size(), call.list = list_.data();
  }

  std::vector<Tensor> results(bool is_batch) {
    std::vector<Tensor> all{output(is_batch, call.outputs)};
    for (Tensor& state : results_) all.push_back(std::move(state));
    return all;
  }

 private:
  const std::vector<Tensor>& states_;
  const Parts& parts_;
  std::vector<Tensor> results_;
  std::vector<void*> next_;
  std::vector<raglane_row_operation> list_;

  void add(const int64_t* code, const double* limits) {
    raglane_row_operation o{};
    int64_t* const fields[] = {&o.kind, &o.option, &o.count, &o.parts, &o.size, &o.extent, &o.to, &o.a, &o.b, &o.c, &o.d, &o.e};
    for (int64_t* field : fields) *field = *code++;
    o.low = limits[0], o.high = limits[1];
    const int64_t extent = o.extent > 0 ? o.extent : 1;
    const bool is_product = o.kind == RAGLANE_ROW_PRODUCT;
    o.weight = part(code[0], is_product || o.kind == RAGLANE_ROW_CONVOLVE ? o.count * o.size
                             : o.kind == RAGLANE_ROW_DECAY                ? o.count
                                                                          : o.size);
    o.bias = part(code[1], o.count);
    const int64_t place = code[2];
    switch (o.kind) {
      case RAGLANE_ROW_CONVOLVE: state(place, o.count * (o.size - 1), &o.state, &o.next); break;
      case RAGLANE_ROW_DECAY:
        state(place, o.count, &o.state, &o.next), state(place + 1, 1, &o.second, &o.next_second);
        break;
      case RAGLANE_ROW_ATTEND:
        state(place, o.count * o.size, &o.state, &o.next);
        if (o.option != 2) break;
        state(place + 1, extent * o.size, &o.second, &o.next_second);
        state(place + 2, extent, &o.third, &o.next_third);
    }
    list_.push_back(o);
  }

  // The address of a tensor of any shape with so many numbers.
  const void* flat(const Tensor& tensor, int64_t count) {
    fits = fits && tensor.scalar_type() == dtype && tensor.device().type() == DeviceType::CPU && tensor.numel() == count &&
           tensor.is_contiguous();
    const int64_t stride = 1;
    return fits ? hold(tensor, Shape(count), &stride) : nullptr;
  }
  const void* part(int64_t place, int64_t count) {
    if (place < 0 || !fits) return nullptr;
    fits = place < (int64_t)parts_.size() && parts_[place].has_value();
    return fits ? flat(*parts_[place], count) : nullptr;
  }
  void state(int64_t place, int64_t count, const void** before, void** after) {
    fits = fits && place >= 0 && place < (int64_t)states_.size();
    if (!fits) return;
    *before = flat(states_[place], call.rows * count), *after = next_[place];
  }
};

// The result of a step; nothing, and nothing is written, if the kernels cannot read a tensor.
template <class Call> std::vector<Tensor> run(Call&& step, bool is_batch, int64_t columns, auto function) {
  if (!step.fits) return {};
  Tensor output = step.output(is_batch, columns);
  char message[256] = "";
  require_ok(function(&step.call, message, sizeof message), message);
  return {output};
}

// The outputs of x (B, D) or (B, 1, D), and the states (B, size) after the step; `sizes` are columns, first and outputs of
// the struct.
std::vector<Tensor> step_block(Tensor x, std::vector<Tensor> states, Parts parts, std::vector<int64_t> code,
                               std::vector<double> limits, std::vector<int64_t> sizes, int64_t isa, int64_t flags) {
  try {
    OfBlock step(x, states, parts, code, limits, sizes, isa, flags);
    if (!step.fits) return {};
    std::vector<Tensor> results = step.results(x.dim() == 3);
    char message[256] = "";
    require_ok(raglane_step_block(&step.call, message, sizeof message), message);
    return results;
  } catch (const std::exception&) {
    return {};
  }
}

// The outputs (B, O) or (B, 1, O) of inputs (B, D) or (B, 1, D), and the states `earlier` (B, E, kept) and `state` (B, E,
// S) in place. `parts` are the weights in the order of the struct, with A and D before those of the output, and the norms
// last, that of the input after the others.
std::vector<Tensor> step_mamba(Tensor x, Tensor earlier, Tensor state, Parts parts, double norm_eps, double eps,
                               bool logarithms, bool residual, bool ordered, int64_t isa, int64_t flags) {
  try {
    OfMamba step(x, earlier, state, parts, norm_eps, eps, logarithms, residual, ordered, isa, flags);
    return run(step, x.dim() == 3, step.call.outputs, raglane_step_mamba);
  } catch (const std::exception&) {
    return {};
  }
}

// The outputs (B, H V) or (B, 1, H V). `parts`: the weight and bias of the convolution, the bias of dt, A, D and the norm;
// `sizes` and `numbers` are those of the struct, from key_heads to v_first and from unit to norm_groups.
std::vector<Tensor> step_attention(Tensor mixed, Tensor gate, Tensor dt, std::optional<Tensor> beta, Tensor earlier,
                                   Tensor state, Parts parts, std::vector<int64_t> sizes, std::vector<double> numbers,
                                   int64_t isa, int64_t flags) {
  try {
    OfAttention step(mixed, gate, dt, beta, earlier, state, parts, sizes, numbers, isa, flags);
    return run(step, mixed.dim() == 3, step.call.heads * step.call.value_size, raglane_step_attention);
  } catch (const std::exception&) {
    return {};
  }
}

const Registration registration([](Registration& to) {
  auto& names = to.names();
  names.def("step_mamba(Tensor x, Tensor(a!) earlier, Tensor(b!) state, Tensor?[] parts, float norm_eps, float eps,"
            " bool logarithms, bool residual, bool ordered, int isa, int flags) -> Tensor[]");
  names.def("step_attention(Tensor mixed, Tensor gate, Tensor dt, Tensor? beta, Tensor(a!) earlier, Tensor(b!) state,"
            " Tensor?[] parts, int[] sizes, float[] numbers, int isa, int flags) -> Tensor[]");
  names.def("step_block(Tensor x, Tensor[] states, Tensor?[] parts, int[] code, float[] limits, int[] sizes, int isa,"
            " int flags) -> Tensor[]");
  auto& cpu = to.of("CPU");
  cpu.impl("step_mamba", TORCH_BOX(&step_mamba));
  cpu.impl("step_attention", TORCH_BOX(&step_attention));
  cpu.impl("step_block", TORCH_BOX(&step_block));
  for (const char* key : refused) {
    auto& other = to.of(key);
    other.impl("step_mamba", TORCH_BOX(&Refused<&step_mamba>::call));
    other.impl("step_attention", TORCH_BOX(&Refused<&step_attention>::call));
    other.impl("step_block", TORCH_BOX(&Refused<&step_block>::call));
  }
});

}  // namespace
}  // namespace raglane::operators
