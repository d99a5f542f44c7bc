// The C interface of layers: checks arguments, orders sequences, and calls the kernels of the instruction set.
#include "abi/raglane.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "abi/checks.h"
#include "abi/round_plan.h"
#include "cells/table.h"
#include "runtime/blocks.h"
#include "runtime/threads.h"
#include "targets/processor.h"

namespace {

namespace tuning = raglane::tuning;
using raglane::Call;
using raglane::ElementwiseCall;
using raglane::Group;
using raglane::groups_of;
using raglane::Kernels;
using raglane::PackTo;
using raglane::PackedHeader;
using raglane::RoundPlan;
using raglane::at_least;
using raglane::batch_of;
using raglane::byte_kernels_of;
using raglane::cache_bytes;
using raglane::cell_count;
using raglane::cell_table;
using raglane::check_packed;
using raglane::checked_offsets;
using raglane::checked_slots;
using raglane::fail;
using raglane::guarded;
using raglane::kernels_of;
using raglane::most_threads;
using raglane::order_of;
using raglane::pack_after_header;
using raglane::present;
using raglane::processor_has;
using raglane::useful_threads;

// The facts of a call's cell, after a check of its number.
const raglane_cell_facts& facts_of(const raglane_layer& l) { return cell_table[l.cell]; }

void check_sizes(const raglane_layer& l) {
  if (l.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)l.abi);
  if (l.cell < 0 || l.cell >= cell_count)
    fail("cell must be from 0 to %lld, got %lld", (long long)cell_count - 1, (long long)l.cell);
  const raglane_cell_facts& cell = facts_of(l);
  if (l.dtype < RAGLANE_FLOAT32 || l.dtype > RAGLANE_INT8)
    fail("dtype must be one of raglane_dtype, got %lld", (long long)l.dtype);
  if (l.directions != 1 && l.directions != 2) fail("directions must be 1 or 2, got %lld", (long long)l.directions);
  at_least("threads", l.threads, 1);
  at_least("sequences", l.sequences, 0);
  at_least("elements", l.elements, 0);
  at_least("input_size", l.input_size, 1);
  at_least("hidden_size", l.hidden_size, 1);
  // Within these limits no product below overflows; beyond them no machine has the memory.
  const int64_t most = int64_t(1) << 40;
  const int64_t largest = 1 << 24;
  if (l.threads > most_threads || l.sequences > most || l.elements > most || l.slot_count > most || l.input_size > largest ||
      l.hidden_size > largest || l.projection_size > largest || l.gate_stride > (1 << 28))
    fail("sizes must be at most those that this kernel supports, got more");
  at_least("projection_size", l.projection_size, 0);
  at_least("checkpoint_every", l.checkpoint_every, 0);
  if (l.projection_size > 0 && !cell.projects)
    fail("projection_size must be 0 for the cell %s, got another number", cell.name);
  if (cell.is_elementwise) {
    if (l.checkpoint_every > 0) fail("checkpoint_every must be 0 for the cell %s, got another number", cell.name);
    if (l.dtype == RAGLANE_INT8)
      fail("dtype must be that of a real for an element-wise cell, got int8");
    return;
  }
  at_least("gate_stride", l.gate_stride,
           cell.slots * (cell.saved ? (l.hidden_size + 15) / 16 * 16 : l.hidden_size));
  // The maximum of products of bytes whose sum fits 32 bits.
  const int64_t terms = 1 << 16;
  if (l.dtype == RAGLANE_INT8 && (l.input_size > terms || l.hidden_size > terms || l.projection_size > terms))
    fail("sizes must be at most %lld for int8 weights, whose sums must fit 32 bits, got more", (long long)terms);
}

// True if the output adds the unchanged input.
bool skips_all(const raglane_layer& l) { return facts_of(l).skips && !l.weights[0].skip; }

void check_weights(const raglane_layer& l, bool backward) {
  const raglane_cell_facts& cell = facts_of(l);
  if (skips_all(l) && l.input_size != l.hidden_size)
    fail("weights.skip must be given for the cell %s if the input and hidden sizes differ, got null", cell.name);
  for (int64_t d = 0; d < l.directions; d++) {
    const raglane_weights& w = l.weights[d];
    const raglane_weight_gradients& g = l.grad_weights[d];
    if (!backward || (l.elements > 0 && (l.checkpoint_every > 0 || l.grad_values))) present("weights.input", w.input);
    if (!cell.is_elementwise || cell.factors) present("weights.hidden", w.hidden);
    if (l.projection_size) present("weights.projection", w.projection);
    if (!w.skip != !l.weights[0].skip) fail("weights.skip must be given in both directions or in neither, got one");
    if (w.skip && !cell.skips) fail("weights.skip must be null for the cell %s, got an address", cell.name);
    if (!backward || l.elements == 0) continue;
    if (g.input || g.skip) present("values", l.values);
    if (g.projection && !l.projection_size)
      fail("grad_weights.projection must be null for a layer without a projection, got an address");
    if (g.skip && !w.skip) fail("grad_weights.skip must be null for a layer without weights.skip, got an address");
  }
}

void check_pointers(const raglane_layer& l, bool backward) {
  const raglane_cell_facts& cell = facts_of(l);
  if (l.dtype == RAGLANE_INT8 && (backward || l.gates))
    fail("dtype must be that of a real if gradients are needed, got int8");
  check_weights(l, backward);
  if (l.slots) {
    if (backward || l.gates || l.directions != 1)
      fail("slots must be null for a call with gradients or two directions, got an address");
    if (l.initial_h || l.initial_c) fail("initial_h and initial_c must be null with slots, got an address");
  }
  if (l.sequences > 0 && !backward) {
    present("final_h", l.final_h);
    if (cell.has_c) present("final_c", l.final_c);
  }
  if (l.elements == 0) return;
  if (!backward || skips_all(l)) present("values", l.values);
  if (!backward && cell.has_c && l.gates && !l.c_states)
    fail("c_states must be given with gates, because backward reads both, got null");
  if (!backward) return;
  if (cell.has_c) present("c_states", l.c_states);
  if (!cell.is_elementwise || !cell.has_c) present("output", l.output);
  const bool again = l.checkpoint_every > 0;  // gates are recomputed, and the caller has no memory for them
  if (again) {
    present("values", l.values);
  } else {
    if (cell.saved) present("gates", l.gates);
    present("grad_gates", l.grad_gates);
    if (!cell.is_elementwise) present("previous_h", l.previous_h);
    if (l.projection_size) present("grad_h", l.grad_h), present("unprojected", l.unprojected);
    if (skips_all(l)) present("grad_skip", l.grad_skip);
  }
}

// The rows of sequences and the starts of steps, copied before the check, because another thread may write to them.
struct TableRows {
  std::vector<int64_t> rows, starts;

  TableRows(raglane_layer& l, bool backward) {
    if (!l.rows) return;
    if (backward || l.gates || l.c_states || l.slots || facts_of(l).is_elementwise)
      fail("rows must be null in calls with gates, c_states or slots, and of element-wise cells, got an address");
    at_least("row_count", l.row_count, 0);
    at_least("steps", l.steps, 0);
    if (l.row_count > int64_t(1) << 40 || l.steps > int64_t(1) << 40)
      fail("row_count and steps must be at most 2^40, got more");
    if (l.steps > 0) present("starts", l.starts);
    rows.assign(l.rows, l.rows + l.sequences), starts.assign(l.starts, l.starts + l.steps);
    // The largest start of the steps up to each one.
    std::vector<int64_t> largest(starts);
    for (int64_t t = 0; t < l.steps; t++) {
      if (starts[t] < 0 || starts[t] >= l.row_count)
        fail("starts[%lld] must be a row of the table, got %lld", (long long)t, (long long)starts[t]);
      if (t > 0) largest[t] = std::max(largest[t], largest[t - 1]);
    }
    for (int64_t b = 0; b < l.sequences; b++) {
      const int64_t length = l.offsets[b + 1] - l.offsets[b];
      if (length > 0 && (length > l.steps || rows[b] < 0 || rows[b] >= l.row_count - largest[length - 1]))
        fail("rows[%lld] must lead to rows of the table, got %lld", (long long)b, (long long)rows[b]);
    }
    l.rows = rows.data(), l.starts = starts.data();
  }
};

// Complete a call: initial states of zeros, and memory for gradients of them that are
// not needed. Returns that memory.
std::vector<unsigned char> complete(raglane_layer& l, bool backward) {
  int64_t rows = l.directions * l.sequences * (l.dtype == RAGLANE_FLOAT64 ? 8 : l.dtype == RAGLANE_BFLOAT16 ? 2 : 4);
  int64_t h = rows * (l.projection_size ? l.projection_size : l.hidden_size), c = facts_of(l).has_c ? rows * l.hidden_size : 0;
  bool reads = !l.initial_h || (c > 0 && !l.initial_c);
  bool writes = backward && (!l.grad_initial_h || (c > 0 && !l.grad_initial_c));
  std::vector<unsigned char> memory((reads ? std::max(h, c) : 0) + (writes ? h + c : 0));
  unsigned char* room = memory.data() + (reads ? std::max(h, c) : 0);
  if (!l.initial_h) l.initial_h = memory.data();
  if (!l.initial_c) l.initial_c = memory.data();
  if (!l.grad_initial_h) l.grad_initial_h = room;
  if (!l.grad_initial_c) l.grad_initial_c = room + h;
  return memory;
}

PackedHeader header_of(const raglane_layer& l) {
  int64_t rest = l.weights[0].skip ? 1 : l.projection_size;
  return {RAGLANE_ABI, l.isa, l.cell, l.dtype, l.directions, l.input_size, l.hidden_size, rest};
}

int32_t run_matrix(raglane_layer& l, const Kernels& kernels, bool backward) {
  std::vector<int64_t> order = order_of(l.offsets, l.sequences);
  double work = 2.0 * facts_of(l).gates * l.hidden_size * (l.input_size + l.hidden_size) * l.directions;
  if (l.flags == 0) l.threads = useful_threads(l.threads, work, l.offsets, l.sequences);
  auto kernel = backward ? kernels.backward : kernels.forward;
  if (l.dtype == RAGLANE_INT8) kernel = byte_kernels_of(l.isa).forward;
  Call call{batch_of(l.offsets, l.elements, order), &l};
  call.rows = l.rows, call.starts = l.starts;
  if (!backward || !l.checkpoint_every || l.elements == 0) return kernel(call);
  RoundPlan rounds(l.offsets, l.sequences, order, l.checkpoint_every);
  call.rounds = &rounds.plan;
  return kernel(call);
}

int32_t run_elementwise(raglane_layer& l, const Kernels& kernels, bool backward) {
  std::vector<Group> groups = groups_of(l.offsets, l.sequences, l.elements);
  int64_t largest = groups.empty() ? 0 : l.offsets[groups[0].end] - l.offsets[groups[0].begin];
  bool multiplies = !backward || l.grad_values || l.grad_weights[0].input;
  double number = 2.0 * (multiplies ? l.input_size : 0) + tuning::row_operations;
  if (l.flags == 0)
    l.threads = useful_threads(l.threads, number * tuning::counted_gates * l.hidden_size * l.elements * l.directions);
  return (backward ? kernels.elementwise_backward : kernels.elementwise_forward)(
      ElementwiseCall{&l, groups.data(), (int64_t)groups.size(), largest, cache_bytes()});
}

// Check a call, and run a copy of it.
int32_t run(const raglane_layer* layer, bool backward, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("layer", layer);
    raglane_layer mine = *layer;
    check_sizes(mine);
    check_pointers(mine, backward);
    if (!backward) check_packed(mine.packed, header_of(mine));
    std::vector<int64_t> offsets = checked_offsets(mine.offsets, mine.sequences, mine.elements);
    mine.offsets = offsets.data();
    TableRows rows(mine, backward);
    std::vector<int64_t> slots = checked_slots(mine.slots, mine.sequences, mine.slot_count);
    if (mine.slots) mine.slots = slots.data(), mine.initial_h = mine.final_h, mine.initial_c = mine.final_c;
    std::vector<unsigned char> memory = complete(mine, backward);
    const Kernels& kernels = kernels_of(mine.isa, mine.dtype);
    return facts_of(mine).is_elementwise ? run_elementwise(mine, kernels, backward) : run_matrix(mine, kernels, backward);
  });
}

int32_t pack_into(const raglane_layer& l, PackTo packing) {
  const Kernels& kernels = kernels_of(l.isa, l.dtype);
  if (facts_of(l).is_elementwise) return kernels.elementwise_pack(ElementwiseCall{&l, nullptr, 0, 0, 0, packing});
  return (l.dtype == RAGLANE_INT8 ? byte_kernels_of(l.isa).pack : kernels.pack)(Call{{}, &l, packing});
}

}  // namespace

extern "C" {

int32_t raglane_pack(const raglane_layer* layer, void* to, int64_t* bytes, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("layer", layer);
    present("bytes", bytes);
    raglane_layer mine = *layer;
    check_sizes(mine);
    // Only the weights matter here.
    mine.sequences = mine.elements = 0;
    mine.packed = nullptr, mine.slots = nullptr, mine.rows = nullptr;
    check_pointers(mine, false);
    return pack_after_header(header_of(mine), to, bytes, [&](PackTo packing) { return pack_into(mine, packing); });
  });
}

int32_t raglane_forward(const raglane_layer* layer, char* message, int64_t size) {
  return run(layer, false, message, size);
}

int32_t raglane_backward(const raglane_layer* layer, char* message, int64_t size) {
  return run(layer, true, message, size);
}

int32_t raglane_describe_cell(int64_t cell, raglane_cell_facts* facts, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("facts", facts);
    if (cell < 0 || cell >= cell_count)
      fail("cell must be from 0 to %lld, got %lld", (long long)cell_count - 1, (long long)cell);
    *facts = cell_table[cell];
    return RAGLANE_OK;
  });
}

int64_t raglane_few_elements(void) { return tuning::few_elements; }

int64_t raglane_few_weights(void) { return tuning::few_weights; }

void* raglane_take_block(int64_t bytes, int64_t* size) {
  const raglane::Block block = bytes > 0 ? raglane::take_block((size_t)bytes) : raglane::Block();
  *size = (int64_t)block.size;
  return block.data;
}

void raglane_give_block(void* block, int64_t size) {
  if (block && size > 0) raglane::give_block({block, (size_t)size});
}

int64_t raglane_least_block(void) { return tuning::least_block; }

const char* raglane_isa_name(int64_t isa) { return raglane::isa_name(isa); }

int32_t raglane_has_isa(int64_t isa) { return processor_has(isa); }

int32_t raglane_abi(void) { return RAGLANE_ABI; }

int32_t raglane_own_threads(void) { return raglane::own_threads(); }

int32_t raglane_multiply_registers(int64_t isa, int64_t dtype, int64_t threads, int64_t rounds, int64_t* operations,
                                   char* message, int64_t size) {
  return guarded(message, size, [&] {
    at_least("threads", threads, 1);
    at_least("rounds", rounds, 0);
    present("operations", operations);
    if (threads > most_threads)
      fail("threads must be at most %lld, got %lld", (long long)most_threads, (long long)threads);
    const Kernels& kernels = kernels_of(isa, dtype);
    std::vector<int64_t> done((size_t)threads);
    raglane::on_threads((int)threads, [&](int thread, int) { done[thread] = kernels.multiply_registers(dtype, rounds); });
    if (done[0] < 0) fail("dtype must be one of raglane_dtype, got %lld", (long long)dtype);
    *operations = std::accumulate(done.begin(), done.end(), int64_t{0});
    return RAGLANE_OK;
  });
}

int32_t raglane_apply(int64_t isa, int64_t dtype, int64_t threads, int64_t function, const void* in,
                      const void* factor, void* out, int64_t count, char* message, int64_t size) {
  return guarded(message, size, [&] {
    at_least("threads", threads, 1);
    at_least("count", count, 0);
    if (count > 0) present("in", in), present("out", out);
    if (dtype < RAGLANE_FLOAT32 || dtype > RAGLANE_FLOAT64 || function < RAGLANE_EXP || function > RAGLANE_SILU)
      fail("dtype and function must be a pair that exists, got %lld and %lld", (long long)dtype, (long long)function);
    const Kernels& kernels = kernels_of(isa, dtype);
    const int64_t vectors = (count + 63) / 64, bytes = dtype == RAGLANE_FLOAT64 ? 8 : 4;
    constexpr double operations = 30;
    threads = raglane::useful_threads(threads, operations * (double)count);
    raglane::on_threads((int)threads, [&](int thread, int of) {
      const int64_t first = vectors * thread / of * 64, end = std::min(vectors * (thread + 1) / of * 64, count);
      kernels.apply(dtype, function, (const char*)in + first * bytes, factor ? (const char*)factor + first * bytes : nullptr,
                    (char*)out + first * bytes, end - first);
    });
    return RAGLANE_OK;
  });
}
}
