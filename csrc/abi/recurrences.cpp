// Checks of the arguments of linear recurrences.
#include <cmath>

#include "abi/checks.h"

namespace {

using namespace raglane;

constexpr int64_t most_width = 1 << 20, most_rows = int64_t(1) << 40;
// Operations of an exponential function and what follows it.
constexpr double scan_operations = 20;

template <class Call> void check_head(const Call& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  if (call.dtype < RAGLANE_FLOAT32 || call.dtype > RAGLANE_BFLOAT16)
    fail("dtype must be RAGLANE_FLOAT32, RAGLANE_FLOAT64 or RAGLANE_BFLOAT16, got %lld", (long long)call.dtype);
  at_least("threads", call.threads, 1);
  at_least("sequences", call.sequences, 0);
  at_least("elements", call.elements, 0);
  if (call.threads > most_threads || call.sequences > most_rows || call.elements > most_rows)
    fail("sizes must be at most those that this kernel supports, got more");
}

void check_size(const char* name, int64_t size) {
  at_least(name, size, 1);
  if (size > most_width) fail("%s must be at most %lld, got %lld", name, (long long)most_width, (long long)size);
}

void check(const raglane_selective_scan& call, bool backward) {
  check_head(call);
  check_size("channels", call.channels);
  check_size("groups", call.groups);
  check_size("states", call.states);
  if (call.channels % call.groups != 0)
    fail("channels must be a multiple of groups, %lld, got %lld", (long long)call.groups, (long long)call.channels);
  if (!(call.least_dt <= call.most_dt)) fail("least_dt must be at most most_dt, got %g and %g", call.least_dt, call.most_dt);
  present("A", call.A);
  if (call.elements > 0) {
    present("x", call.x), present("dt", call.dt), present("B", call.B), present("C", call.C);
    if (!backward) present("output", call.output);
    if (backward && call.elements >= border) present("borders", call.borders);
  }
  if (!backward && call.sequences > 0) present("final", call.final);
}

int32_t scan(const raglane_selective_scan* given, bool backward, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("scan", given);
    raglane_selective_scan mine = *given;
    check(mine, backward);
    const Kernels& kernels = kernels_of(mine.isa, mine.dtype);
    std::vector<int64_t> offsets = checked_offsets(mine.offsets, mine.sequences, mine.elements);
    mine.offsets = offsets.data();
    const double each = scan_operations * (backward ? 2 : 1) * (double)mine.channels * (double)mine.states;
    if (mine.flags == 0) mine.threads = useful_threads(mine.threads, each * (double)mine.elements);
    std::vector<Group> groups = groups_of(mine.offsets, mine.sequences, mine.elements);
    SelectiveScan call{&mine, groups.data(), (int64_t)groups.size()};
    return (backward ? kernels.scan_backward : kernels.scan)(call);
  });
}

template <class Call> void check_sizes_of_heads(const Call& call) {
  check_size("key_heads", call.key_heads);
  check_size("heads", call.heads);
  check_size("key_size", call.key_size);
  check_size("value_size", call.value_size);
  if (call.heads % call.key_heads != 0)
    fail("heads must be a multiple of key_heads, %lld, got %lld", (long long)call.key_heads, (long long)call.heads);
}

template <class Call> void check_head_of_step(const Call& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  if (call.dtype != RAGLANE_FLOAT32 && call.dtype != RAGLANE_FLOAT64)
    fail("dtype must be RAGLANE_FLOAT32 or RAGLANE_FLOAT64, got %lld", (long long)call.dtype);
  at_least("rows", call.rows, 0);
  if (call.rows > most_width) fail("rows must be at most %lld, got %lld", (long long)most_width, (long long)call.rows);
}

template <class Call> void check_step(const Call& call) {
  check_head_of_step(call);
  check_size("taps", call.taps);
  at_least("kept", call.kept, call.taps - 1);
  if (call.kept > most_width) fail("kept must be at most %lld, got %lld", (long long)most_width, (long long)call.kept);
  present("conv_weight", call.conv_weight);
  if (call.rows == 0) return;
  present("state", call.state), present("output", call.output);
  if (call.kept > 0) present("earlier", call.earlier);
}

void check(const raglane_mamba_step& call) {
  check_step(call);
  check_size("inputs", call.inputs);
  check_size("outputs", call.outputs);
  check_size("channels", call.channels);
  check_size("states", call.states);
  check_size("rank", call.rank);
  if (call.residual && call.outputs != call.inputs)
    fail("outputs must be %lld, the inputs, with residual, got %lld", (long long)call.inputs, (long long)call.outputs);
  present("in_weight", call.in_weight), present("x_weight", call.x_weight), present("dt_weight", call.dt_weight);
  present("A", call.A), present("out_weight", call.out_weight);
  if (call.rows > 0) present("x", call.x);
}

void check(const raglane_attention_step& call) {
  check_step(call);
  check_sizes_of_heads(call);
  const int64_t columns = call.heads * call.value_size, keys = call.key_heads * call.key_size, channels = 2 * keys + columns;
  for (int64_t first : {call.q_first, call.k_first}) {
    if (first < 0 || first > channels - keys)
      fail("q_first and k_first must be from 0 to %lld, got %lld", (long long)(channels - keys), (long long)first);
  }
  if (call.v_first < 0 || call.v_first > channels - columns)
    fail("v_first must be from 0 to %lld, got %lld", (long long)(channels - columns), (long long)call.v_first);
  if (call.transposed && call.delta) fail("delta must be without transposed, got both");
  at_least("norm_groups", call.norm_groups, 1);
  at_least("norm_size", call.norm_size, 1);
  if (columns % call.norm_groups || columns % call.norm_size || call.norm_size % (columns / call.norm_groups))
    fail("norm_groups and norm_size must divide %lld columns, got %lld and %lld", (long long)columns,
         (long long)call.norm_groups, (long long)call.norm_size);
  present("dt_bias", call.dt_bias), present("A", call.A), present("norm", call.norm);
  if (call.rows > 0) present("mixed", call.mixed), present("dt", call.dt), present("gate", call.gate);
}

struct Columns {
  const raglane_block_step& call;

  // Columns of the table that an operation reads or writes.
  void within(const char* name, int64_t first, int64_t count) const {
    if (first < 0 || first > call.columns - count)
      fail("%s must be from 0 to %lld, got %lld", name, (long long)(call.columns - count), (long long)first);
  }
  void written(const raglane_row_operation& o, const void* state, const void* next) const {
    if (o.count < 1 || call.rows == 0) return;
    present("state", state), present("next", next);
    if (state == next) fail("next must be other memory than state, got the same");
  }

  void check(const raglane_row_operation& o) const {
    for (int64_t size : {o.count, o.parts, o.size, o.extent}) check_size("count, parts, size and extent", size);
    within("to", o.to, o.count);
    switch (o.kind) {
      case RAGLANE_ROW_PRODUCT:
        if (o.count % o.parts) fail("count must be a multiple of parts, %lld, got %lld", (long long)o.parts, (long long)o.count);
        within("a", o.a, o.parts * o.size);
        return present("weight", o.weight);
      case RAGLANE_ROW_CONVOLVE:
        within("a", o.a, o.count);
        present("weight", o.weight);
        return o.size > 1 ? written(o, o.state, o.next) : void();
      case RAGLANE_ROW_FUNCTION:
        if (o.option < 0 || o.option > RAGLANE_ROW_CAP) fail("option must be a function, got %lld", (long long)o.option);
        return within("a", o.a, o.count);
      case RAGLANE_ROW_ADD:
      case RAGLANE_ROW_MULTIPLY:
        if (o.weight && o.count % o.size) fail("count must be a multiple of size, %lld, got %lld", (long long)o.size, (long long)o.count);
        if (!o.weight) within("b", o.b, o.count);
        return within("a", o.a, o.count);
      case RAGLANE_ROW_NORM:
        if (o.count != o.parts * o.size) fail("count must be parts times size, got %lld", (long long)o.count);
        return within("a", o.a, o.count);
      case RAGLANE_ROW_ATTEND:
        if (o.extent % o.parts || o.count % o.extent)
          fail("parts must divide extent, and extent must divide count, got %lld, %lld and %lld", (long long)o.parts,
               (long long)o.extent, (long long)o.count);
        within("a", o.a, o.parts * o.size), within("b", o.b, o.parts * o.size), within("c", o.c, o.count);
        within("d", o.d, o.extent), within("e", o.e, o.extent);
        written(o, o.state, o.next);
        if (o.option != 2) return;
        written(o, o.second, o.next_second);
        return written(o, o.third, o.next_third);
      case RAGLANE_ROW_DECAY:
        within("a", o.a, o.count), within("b", o.b, o.count), within("c", o.c, o.count);
        present("weight", o.weight);
        written(o, o.state, o.next);
        return written(o, o.second, o.next_second);
    }
    fail("kind must be a raglane_row_kind, got %lld", (long long)o.kind);
  }
};

void check(const raglane_block_step& call) {
  check_head_of_step(call);
  check_size("inputs", call.inputs);
  check_size("outputs", call.outputs);
  check_size("columns", call.columns);
  at_least("operations", call.operations, 0);
  const Columns columns{call};
  columns.within("inputs", 0, call.inputs);
  columns.within("first", call.first, call.outputs);
  if (call.operations > 0) present("list", call.list);
  for (int64_t i = 0; i < call.operations; i++) columns.check(call.list[i]);
  if (call.rows > 0) present("x", call.x), present("output", call.output);
}

void check(const raglane_attention& call, bool backward) {
  check_head(call);
  check_sizes_of_heads(call);
  if (call.heads * call.key_size > most_width * 16 / call.value_size)
    fail("states must be of at most %lld numbers, got more", (long long)most_width * 16);
  if (!(call.eps >= 0)) fail("eps must be at least 0, got %g", call.eps);
  if (call.log_gain && (call.gain || call.delta || call.per_key))
    fail("log_gain must be without gain, delta and decays of keys, got one of them");
  if (call.elements > 0) {
    present("q", call.q), present("k", call.k), present("v", call.v);
    if (!backward || call.log_gain) present("output", call.output);
    if (backward && call.elements >= border) present("borders", call.borders);
    if (backward && call.delta) present("errors", call.errors);
    if (backward && call.log_gain) present("reads", call.reads), present("levels", call.levels);
  }
  if (call.sequences == 0) return;
  if (!backward || (call.log_gain && call.grad_final)) present("final", call.final);
  if (call.log_gain && (!backward || call.grad_final_normaliser)) present("final_normaliser", call.final_normaliser);
  if (call.log_gain && !backward) present("final_stabiliser", call.final_stabiliser);
}

// Of empty sequences final states are the initial ones, and so are their gradients.
void copy_empty(const raglane_attention& call, const void* from, void* to, int64_t numbers) {
  const int64_t bytes = numbers * (call.dtype == RAGLANE_FLOAT64 ? 8 : 4);
  for (int64_t b = 0; to && b < call.sequences; b++) {
    if (call.offsets[b] < call.offsets[b + 1]) continue;
    char* row = (char*)to + b * bytes;
    from ? (void)std::memcpy(row, (const char*)from + b * bytes, bytes) : (void)std::memset(row, 0, bytes);
  }
}

int32_t attend(const raglane_attention* given, bool backward, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("attention", given);
    raglane_attention mine = *given;
    check(mine, backward);
    const Kernels& kernels = kernels_of(mine.isa, mine.dtype);
    std::vector<int64_t> offsets = checked_offsets(mine.offsets, mine.sequences, mine.elements);
    mine.offsets = offsets.data();
    const double each = (backward ? 20 : 6) * (double)mine.heads * (double)(mine.key_size * mine.value_size);
    if (mine.flags == 0) mine.threads = useful_threads(mine.threads, each * (double)mine.elements);
    std::vector<int64_t> order = order_of(mine.offsets, mine.sequences);
    LinearAttention call{&mine, order.data(), (int64_t)order.size()};
    const int32_t status = (backward ? kernels.attend_backward : kernels.attend)(call);
    if (status != RAGLANE_OK) return status;
    const int64_t sizes[] = {mine.heads * mine.key_size * mine.value_size, mine.heads * mine.key_size, mine.heads};
    const void* initial[] = {mine.initial, mine.initial_normaliser, mine.initial_stabiliser};
    const void* grad_final[] = {mine.grad_final, mine.grad_final_normaliser, mine.grad_final_stabiliser};
    void* final[] = {mine.final, mine.final_normaliser, mine.final_stabiliser};
    void* grad_initial[] = {mine.grad_initial, mine.grad_initial_normaliser, mine.grad_initial_stabiliser};
    for (int state = 0; state < (mine.log_gain ? 3 : 1); state++) {
      if (backward) copy_empty(mine, grad_final[state], grad_initial[state], sizes[state]);
      else copy_empty(mine, initial[state], final[state], sizes[state]);
    }
    return status;
  });
}

}  // namespace

extern "C" {

int64_t raglane_border(void) { return border; }

int32_t raglane_scan_selectively(const raglane_selective_scan* call, char* message, int64_t size) {
  return scan(call, false, message, size);
}

int32_t raglane_scan_selectively_backward(const raglane_selective_scan* call, char* message, int64_t size) {
  return scan(call, true, message, size);
}

int32_t raglane_step_mamba(const raglane_mamba_step* step, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("step", step);
    const raglane_mamba_step mine = *step;
    check(mine);
    return kernels_of(mine.isa, mine.dtype).step_mamba(mine);
  });
}

int32_t raglane_step_attention(const raglane_attention_step* step, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("step", step);
    const raglane_attention_step mine = *step;
    check(mine);
    return kernels_of(mine.isa, mine.dtype).step_attention(mine);
  });
}

int32_t raglane_step_block(const raglane_block_step* step, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("step", step);
    const raglane_block_step mine = *step;
    check(mine);
    return kernels_of(mine.isa, mine.dtype).step_block(mine);
  });
}

int32_t raglane_attend(const raglane_attention* call, char* message, int64_t size) {
  return attend(call, false, message, size);
}

int32_t raglane_attend_backward(const raglane_attention* call, char* message, int64_t size) {
  return attend(call, true, message, size);
}
}
