// Checks of the arguments of linear recurrences.
#include <cmath>

#include "abi/grouped.h"

namespace {

using namespace raglane;

// Operations of an exponential function and what follows it.
constexpr double scan_operations = 20;

void check_multiple(const char* name, int64_t value, const char* of, int64_t divisor) {
  if (value % divisor != 0)
    fail("%s must be a multiple of %s, %lld, got %lld", name, of, (long long)divisor, (long long)value);
}

// Some of a number of columns, from `first` on.
void check_columns(const char* name, int64_t first, int64_t count, int64_t columns) {
  if (first < 0 || first > columns - count)
    fail("%s must be from 0 to %lld, got %lld", name, (long long)(columns - count), (long long)first);
}

double check(const raglane_selective_scan& call, bool backward) {
  check_size("channels", call.channels);
  check_size("groups", call.groups);
  check_size("states", call.states);
  check_multiple("channels", call.channels, "groups", call.groups);
  if (!(call.least_dt <= call.most_dt)) fail("least_dt must be at most most_dt, got %g and %g", call.least_dt, call.most_dt);
  present("A", call.A);
  if (call.elements > 0) {
    present("x", call.x), present("dt", call.dt), present("B", call.B), present("C", call.C);
    if (!backward) present("output", call.output);
    if (backward && call.elements >= border) present("borders", call.borders);
  }
  if (!backward && call.sequences > 0) present("final", call.final);
  return scan_operations * (backward ? 2 : 1) * (double)call.channels * (double)call.states;
}

int32_t scan(const raglane_selective_scan* given, bool backward, char* message, int64_t size) {
  const auto kernel = backward ? &Kernels::scan_backward : &Kernels::scan;
  return run_grouped(given, [&](const auto& call) { return check(call, backward); }, kernel, message, size);
}

template <class Call> void check_sizes_of_heads(const Call& call) {
  check_size("key_heads", call.key_heads);
  check_size("heads", call.heads);
  check_size("key_size", call.key_size);
  check_size("value_size", call.value_size);
  check_multiple("heads", call.heads, "key_heads", call.key_heads);
}

template <class Call> void check_head_of_step(const Call& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  if (call.dtype != RAGLANE_FLOAT32 && call.dtype != RAGLANE_FLOAT64)
    fail("dtype must be RAGLANE_FLOAT32 or RAGLANE_FLOAT64, got %lld", (long long)call.dtype);
  between("rows", call.rows, 0, most_width);
}

template <class Call> void check_step(const Call& call) {
  check_head_of_step(call);
  check_size("taps", call.taps);
  between("kept", call.kept, call.taps - 1, most_width);
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
  check_columns("q_first", call.q_first, keys, channels);
  check_columns("k_first", call.k_first, keys, channels);
  check_columns("v_first", call.v_first, columns, channels);
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
  void within(const char* name, int64_t first, int64_t count) const { check_columns(name, first, count, call.columns); }
  void written(const raglane_row_operation& o, const void* state, const void* next) const {
    if (o.count < 1 || call.rows == 0) return;
    present("state", state), present("next", next);
    if (state == next) fail("next must be other memory than state, got the same");
  }

  void check(const raglane_row_operation& o) const {
    for (int64_t size : {o.count, o.parts, o.size, o.extent}) check_size("count, parts, size and extent", size);
    within("to", o.to, o.count);
    const bool reads_parts = o.kind == RAGLANE_ROW_PRODUCT || o.kind == RAGLANE_ROW_ATTEND;
    within("a", o.a, reads_parts ? o.parts * o.size : o.count);
    switch (o.kind) {
      case RAGLANE_ROW_PRODUCT:
        check_multiple("count", o.count, "parts", o.parts);
        return present("weight", o.weight);
      case RAGLANE_ROW_CONVOLVE:
        present("weight", o.weight);
        return o.size > 1 ? written(o, o.state, o.next) : void();
      case RAGLANE_ROW_FUNCTION:
        return between("option", o.option, 0, RAGLANE_ROW_CAP);
      case RAGLANE_ROW_ADD:
      case RAGLANE_ROW_MULTIPLY:
        return o.weight ? check_multiple("count", o.count, "size", o.size) : within("b", o.b, o.count);
      case RAGLANE_ROW_NORM:
        if (o.count != o.parts * o.size) fail("count must be parts times size, got %lld", (long long)o.count);
        return;
      case RAGLANE_ROW_ATTEND:
        check_multiple("extent", o.extent, "parts", o.parts);
        check_multiple("count", o.count, "extent", o.extent);
        within("b", o.b, o.parts * o.size), within("c", o.c, o.count);
        within("d", o.d, o.extent), within("e", o.e, o.extent);
        written(o, o.state, o.next);
        if (o.option != 2) return;
        written(o, o.second, o.next_second);
        return written(o, o.third, o.next_third);
      case RAGLANE_ROW_DECAY:
        within("b", o.b, o.count), within("c", o.c, o.count);
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
    for (int64_t b = 0; b < mine.sequences; b++)
      if (offsets[b] == offsets[b + 1]) order.push_back(b);
    return (backward ? kernels.attend_backward : kernels.attend)({&mine, order.data(), mine.sequences});
  });
}

template <class Call>
int32_t step(const Call* given, int32_t (*Kernels::*kernel)(const Call&), char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("step", given);
    const Call mine = *given;
    check(mine);
    return (kernels_of(mine.isa, mine.dtype).*kernel)(mine);
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

int32_t raglane_step_mamba(const raglane_mamba_step* given, char* message, int64_t size) {
  return step(given, &Kernels::step_mamba, message, size);
}

int32_t raglane_step_attention(const raglane_attention_step* given, char* message, int64_t size) {
  return step(given, &Kernels::step_attention, message, size);
}

int32_t raglane_step_block(const raglane_block_step* given, char* message, int64_t size) {
  return step(given, &Kernels::step_block, message, size);
}

int32_t raglane_attend(const raglane_attention* call, char* message, int64_t size) {
  return attend(call, false, message, size);
}

int32_t raglane_attend_backward(const raglane_attention* call, char* message, int64_t size) {
  return attend(call, true, message, size);
}
}
