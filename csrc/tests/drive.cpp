// A randomised driver for the sanitizers: many small calls through the C interface, with every buffer on the heap at
// its exact size, so that AddressSanitizer sees the first byte outside of one. It checks what can be checked without
// a second implementation: that results are finite, and bit-identical for any division of the work.
//
//   drive [rounds] [seed]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "tests/drawn_program.h"
#include "tests/drawn_recurrence.h"
#include "tests/drawn_search.h"
#include "tests/drawn_step.h"

namespace {

struct Case {
  raglane_layer layer{};
  raglane_cell_facts cell{};
  std::vector<int64_t> offsets;
  std::vector<Bytes> inputs;   // values, h, c, weights
  std::vector<Bytes> results;  // output, final h, final c, gates, cells, then the results of backward
};

// The numbers of all cells of a kind, from the library.
std::vector<int64_t> cells_of_kind(bool is_elementwise) {
  std::vector<int64_t> cells;
  raglane_cell_facts facts;
  for (int64_t cell = 0; raglane_describe_cell(cell, &facts, nullptr, 0) == RAGLANE_OK; cell++)
    if (facts.is_elementwise == is_elementwise) cells.push_back(cell);
  return cells;
}

// Facts of layers of both kinds; sequences are shorter than `longest`.
void draw_common(Case& c, const std::vector<int64_t>& cells, int dtypes, int longest, std::mt19937& random) {
  raglane_layer& l = c.layer;
  l.abi = RAGLANE_ABI;
  l.isa = any_isa(random);
  l.cell = cells[below(random, (int)cells.size())], l.dtype = below(random, dtypes);
  raglane_describe_cell(l.cell, &c.cell, nullptr, 0);
  l.directions = 1 + below(random, 2), l.threads = 1 + below(random, 4);
  l.sequences = below(random, 12), l.input_size = 1 + below(random, 40), l.hidden_size = 1 + below(random, 70);
  c.offsets.push_back(0);
  for (int64_t b = 0; b < l.sequences; b++)
    c.offsets.push_back(c.offsets.back() + (below(random, 4) ? below(random, longest) : 0));
  l.elements = c.offsets.back(), l.offsets = c.offsets.data();
  c.inputs.reserve(64), c.results.reserve(64);
}

// Buffers of their exact size, freed with the case.
const void* in(Case& c, int64_t count, std::mt19937& random) {
  return c.inputs.emplace_back(random_reals(c.layer.dtype, count, random)).data();
}
void* out(Case& c, int64_t count) {
  return c.results.emplace_back(count * bytes_of(c.layer.dtype)).data();
}

Case draw_matrix(std::mt19937& random) {
  Case c;
  static const std::vector<int64_t> cells = cells_of_kind(false);
  // Sometimes one step, for which weights are packed in turn, or more elements than are packed together.
  constexpr int longest[] = {2, 9, 9, 9, 9, 9, 9, 200};
  draw_common(c, cells, 4, longest[below(random, 8)], random);
  raglane_layer& l = c.layer;
  l.projection_size = c.cell.projects && below(random, 3) == 0 ? 1 + below(random, 40) : 0;
  int64_t gates = c.cell.gates, saved = c.cell.saved;
  int64_t K = l.directions, N = l.elements, H = l.hidden_size, P = l.projection_size ? l.projection_size : H;
  bool has_c = c.cell.has_c;
  l.values = in(c, N * l.input_size, random);
  l.initial_h = below(random, 3) ? in(c, K * l.sequences * P, random) : nullptr;
  l.initial_c = has_c && below(random, 3) ? in(c, K * l.sequences * H, random) : nullptr;
  for (int64_t d = 0; d < K; d++) {
    l.weights[d].input = in(c, gates * H * l.input_size, random), l.weights[d].hidden = in(c, gates * H * P, random);
    if (below(random, 2)) l.weights[d].input_bias = in(c, gates * H, random);
    if (below(random, 2)) l.weights[d].hidden_bias = in(c, gates * H, random);
    if (l.projection_size) l.weights[d].projection = in(c, P * H, random);
  }
  l.grad_output = below(random, 3) ? in(c, N * K * P, random) : nullptr;
  l.grad_c_states = has_c && below(random, 2) ? in(c, K * N * H, random) : nullptr;
  l.grad_final_h = below(random, 3) ? in(c, K * l.sequences * P, random) : nullptr;
  l.grad_final_c = has_c && below(random, 3) ? in(c, K * l.sequences * H, random) : nullptr;
  l.output = out(c, N * K * P), l.final_h = out(c, K * l.sequences * P);
  l.final_c = has_c ? out(c, K * l.sequences * H) : nullptr;
  l.gate_stride = c.cell.slots * ((H + 15) / 16 * 16) + below(random, 3);
  l.gates = out(c, K * N * (saved ? l.gate_stride : 0)), l.c_states = has_c ? out(c, K * N * H) : nullptr;
  l.grad_gates = out(c, K * N * l.gate_stride), l.previous_h = out(c, K * N * P);
  l.grad_h = l.projection_size ? out(c, K * N * P) : nullptr;
  l.unprojected = l.projection_size ? out(c, K * N * H) : nullptr;
  l.grad_initial_h = below(random, 3) ? out(c, K * l.sequences * P) : nullptr;
  l.grad_initial_c = has_c && below(random, 3) ? out(c, K * l.sequences * H) : nullptr;
  if (!saved || l.dtype == RAGLANE_INT8) l.gates = nullptr;
  if (below(random, 3) == 0) {  // with the scratch of rounds
    l.checkpoint_every = 1 + below(random, below(random, 2) ? 6 : 300);
    l.gates = l.grad_gates = l.previous_h = l.grad_h = l.unprojected = nullptr;
  }
  l.grad_values = below(random, 2) ? out(c, N * l.input_size) : nullptr;
  for (int64_t d = 0; d < K; d++) {
    raglane_weight_gradients& wanted = l.grad_weights[d];
    if (below(random, 2)) wanted.input = out(c, gates * H * l.input_size);
    if (below(random, 2)) wanted.hidden = out(c, gates * H * P);
    if (below(random, 2)) wanted.input_bias = out(c, gates * H);
    if (below(random, 2)) wanted.hidden_bias = out(c, gates * H);
    if (l.projection_size && below(random, 2)) wanted.projection = out(c, P * H);
  }
  return c;
}

Case draw_elementwise(std::mt19937& random) {
  Case c;
  static const std::vector<int64_t> cells = cells_of_kind(true);
  draw_common(c, cells, 3, below(random, 3) ? 9 : 300, random);
  raglane_layer& l = c.layer;
  bool has_c = c.cell.has_c;
  if (c.cell.skips && below(random, 2)) l.input_size = l.hidden_size;
  bool skips = c.cell.skips && l.input_size == l.hidden_size, projects = c.cell.skips && !skips;
  int64_t K = l.directions, N = l.elements, H = l.hidden_size, D = l.input_size, states = K * l.sequences * H;
  int64_t gates = c.cell.gates, recurrent = c.cell.factors, biases = c.cell.biases, slots = c.cell.slots + projects;
  l.values = in(c, N * D, random), l.initial_h = below(random, 3) ? in(c, states, random) : nullptr;
  l.initial_c = has_c && below(random, 3) ? in(c, states, random) : nullptr;
  bool biased = below(random, 2);
  for (int64_t d = 0; d < K; d++) {
    l.weights[d].input = in(c, gates * H * D, random);
    if (recurrent) l.weights[d].hidden = in(c, recurrent * H, random);
    if (biased) l.weights[d].input_bias = in(c, biases * H, random);
    if (projects) l.weights[d].skip = in(c, H * D, random);
  }
  l.grad_output = below(random, 3) ? in(c, N * K * H, random) : nullptr;
  l.grad_c_states = has_c && below(random, 2) ? in(c, N * K * H, random) : nullptr;
  l.grad_final_h = below(random, 3) ? in(c, states, random) : nullptr;
  l.grad_final_c = has_c && below(random, 3) ? in(c, states, random) : nullptr;
  l.output = out(c, N * K * H), l.final_h = out(c, states), l.final_c = has_c ? out(c, states) : nullptr;
  l.gates = c.cell.saved ? out(c, K * N * (c.cell.saved + projects) * H) : nullptr;
  l.c_states = has_c ? out(c, N * K * H) : nullptr;
  l.grad_gates = l.gates && below(random, 2) ? l.gates : out(c, K * N * slots * H);
  l.grad_skip = skips ? out(c, K * N * H) : nullptr;
  l.grad_initial_h = out(c, states), l.grad_initial_c = has_c ? out(c, states) : nullptr;
  l.grad_values = below(random, 2) ? out(c, N * D) : nullptr;
  for (int64_t d = 0; d < K; d++) {
    if (below(random, 2)) l.grad_weights[d].input = out(c, gates * H * D);
    if (recurrent && below(random, 2)) l.grad_weights[d].hidden = out(c, recurrent * H);
    if (biased && below(random, 2)) l.grad_weights[d].input_bias = out(c, biases * H);
    if (projects && below(random, 2)) l.grad_weights[d].skip = out(c, H * D);
  }
  return c;
}

// Memory of its exact size, aligned as packed weights must be.
struct Packed {
  static constexpr std::align_val_t alignment{64};

  void* memory = nullptr;
  ~Packed() { operator delete(memory, alignment); }
};

// Pack the weights of a layer or a program.
template <class Function, class Argument> void pack(Function function, const Argument* argument, Packed& packed) {
  char message[256] = "";
  int64_t bytes = 0;
  if (function(argument, nullptr, &bytes, message, sizeof message) != RAGLANE_OK ||
      function(argument, packed.memory = operator new(bytes, Packed::alignment), &bytes, message, sizeof message) !=
          RAGLANE_OK) {
    std::fprintf(stderr, "failed: %s\n", message);
    std::exit(1);
  }
}

// After each run of a case but the last, pack its weights for the other runs, or not.
void pack_some(Case& c, Packed& packed, std::mt19937& random) {
  if (below(random, 2)) return;
  pack(raglane_pack, &c.layer, packed);
  c.layer.packed = packed.memory;
}

// Run a case and compare its results with those of the first run.
void check(Case& c, std::vector<Bytes>& wanted, int round, unsigned seed) {
  char message[256] = "";
  for (Bytes& bytes : c.results)
    if (!bytes.empty()) std::memset(bytes.data(), 0xff, bytes.size());
  if (raglane_forward(&c.layer, message, sizeof message) != RAGLANE_OK ||
      (c.layer.dtype != RAGLANE_INT8 && raglane_backward(&c.layer, message, sizeof message) != RAGLANE_OK)) {
    std::fprintf(stderr, "failed: %s\n", message);
    std::exit(1);
  }
  if (wanted.empty()) wanted = c.results;
  if (c.results == wanted) return;
  std::fprintf(stderr, "round %d, seed %u: other bits with flags %d, %d threads\n", round, seed, (int)c.layer.flags,
               (int)c.layer.threads);
  std::exit(1);
}

// In inference in one direction, states in slots of pools give the same bits, and no other slot is written.
void check_slots(Case& c, std::mt19937& random, int round, unsigned seed) {
  raglane_layer l = c.layer;
  if (l.directions != 1) return;
  const bool is_narrow = l.dtype == RAGLANE_BFLOAT16;
  const int64_t H = l.hidden_size, P = l.projection_size ? l.projection_size : H, bytes = bytes_of(l.dtype);
  l.gates = l.c_states = nullptr, l.checkpoint_every = 0;
  Bytes output(l.elements * P * bytes), h(l.sequences * P * bytes), c_final(l.sequences * H * bytes);
  l.output = output.data(), l.final_h = h.data(), l.final_c = c.cell.has_c ? c_final.data() : nullptr;
  char message[256] = "";
  auto run = [&](raglane_status wanted) {
    const raglane_stage stages[] = {{&l, nullptr}};
    if (raglane_run_stages(stages, 1, l.threads, l.sequences, l.elements, message, sizeof message) == wanted) return;
    std::fprintf(stderr, "round %d, seed %u: slots: %s\n", round, seed, message), std::exit(1);
  };
  run(RAGLANE_OK);
  Pools pools(l.sequences, random);
  const int64_t wide = is_narrow ? 4 : bytes;
  Bytes got(output.size()), h_pool = pools.filled(l.initial_h, P, bytes, wide), c_pool;
  Bytes h_wanted = pools.filled(h.data(), P, bytes, wide), c_wanted;
  if (c.cell.has_c) c_pool = pools.filled(l.initial_c, H, bytes, wide), c_wanted = pools.filled(c_final.data(), H, bytes, wide);
  l.initial_h = l.initial_c = nullptr, l.output = got.data(), l.final_h = h_pool.data();
  l.final_c = c.cell.has_c ? c_pool.data() : nullptr, l.slot_count = pools.count, l.slots = pools.slots.data();
  if (l.sequences > 0) {
    const Bytes before = h_pool;
    std::vector<int64_t> wrong = pools.slots;
    wrong[0] = l.sequences > 1 && below(random, 2) ? wrong[1] : below(random, 2) ? -1 : pools.count;
    l.slots = wrong.data();
    run(RAGLANE_BAD_ARGUMENT);
    l.slots = pools.slots.data();
    if (h_pool != before) std::fprintf(stderr, "round %d, seed %u: a failed call wrote\n", round, seed), std::exit(1);
  }
  run(RAGLANE_OK);
  if (got == output && (is_narrow || (h_pool == h_wanted && c_pool == c_wanted))) return;
  std::fprintf(stderr, "round %d, seed %u: other bits with slots\n", round, seed);
  std::exit(1);
}

// In inference, values and output in the rows of a table give the same bits, and no other row is read or written.
void check_tables(Case& c, std::mt19937& random, int round, unsigned seed) {
  raglane_layer l = c.layer;
  const int64_t K = l.directions, P = l.projection_size ? l.projection_size : l.hidden_size, bytes = bytes_of(l.dtype);
  l.gates = l.c_states = nullptr, l.checkpoint_every = 0;
  auto run = [&](raglane_status wanted) {
    char message[256] = "";
    if (raglane_forward(&l, message, sizeof message) == wanted) return;
    std::fprintf(stderr, "round %d, seed %u: rows: %s\n", round, seed, message), std::exit(1);
  };
  const int64_t in_row = l.input_size * bytes, out_row = K * P * bytes;
  Bytes flat(l.elements * out_row);
  l.output = flat.data();
  run(RAGLANE_OK);
  const bool by_step = below(random, 2);
  int64_t longest = 0;  // a sequence
  for (int64_t b = 0; b < l.sequences; b++)
    if (l.offsets[b + 1] - l.offsets[b] > l.steps) l.steps = l.offsets[b + 1] - l.offsets[b], longest = b;
  std::vector<int64_t> rows(l.sequences), starts(l.steps);
  for (int64_t b = 0; b < l.sequences; b++) rows[b] = by_step ? b : b * l.steps;
  for (int64_t t = 0; t < l.steps; t++) starts[t] = by_step ? t * l.sequences : t;
  l.row_count = l.sequences * l.steps;
  Bytes values(l.row_count * in_row, 0xff), wanted(l.row_count * out_row, 0xff), got(wanted);
  for (int64_t b = 0; b < l.sequences; b++)
    for (int64_t i = l.offsets[b]; i < l.offsets[b + 1]; i++) {
      const int64_t row = rows[b] + starts[i - l.offsets[b]];
      std::memcpy(values.data() + row * in_row, (const char*)c.layer.values + i * in_row, in_row);
      std::memcpy(wanted.data() + row * out_row, flat.data() + i * out_row, out_row);
    }
  l.rows = rows.data(), l.starts = starts.data(), l.values = values.data(), l.output = got.data();
  if (l.elements > 0) {
    const int64_t right = rows[longest];
    rows[longest] = below(random, 2) ? -1 : l.row_count - starts[l.steps - 1];
    run(RAGLANE_BAD_ARGUMENT);
    rows[longest] = right;
    starts[l.steps - 1] += l.row_count;
    run(RAGLANE_BAD_ARGUMENT);
    starts[l.steps - 1] -= l.row_count;
  }
  run(RAGLANE_OK);
  if (got == wanted) return;
  std::fprintf(stderr, "round %d, seed %u: other bits with rows\n", round, seed);
  std::exit(1);
}

// Rows to a padded tensor or a pack and back, with any number of threads: the result must equal the input.
void check_rows(std::mt19937& random, int round, unsigned seed) {
  raglane_rows r{};
  r.abi = RAGLANE_ABI, r.is_pack = below(random, 2);
  // Often a few bytes, sometimes enough for several threads.
  r.row_bytes = below(random, 4) ? below(random, 40) : 20000;
  r.sequences = below(random, 12);
  std::vector<int64_t> drawn(r.sequences), order(r.sequences), sizes;
  int64_t longest = 0;
  for (int64_t b = 0; b < r.sequences; b++) {
    drawn[b] = below(random, 4) ? below(random, 9) : 0, order[b] = b;
    longest = std::max(longest, drawn[b]), r.elements += drawn[b];
  }
  std::shuffle(order.begin(), order.end(), random);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return drawn[a] > drawn[b]; });
  for (int64_t t = 0; t < longest; t++)
    sizes.push_back(std::count_if(drawn.begin(), drawn.end(), [&](int64_t length) { return length > t; }));
  r.steps = r.is_pack ? longest : longest + below(random, 3);
  bool by_step = below(random, 2);
  r.sequence_stride = r.row_bytes * (by_step ? 1 : r.steps), r.step_stride = r.row_bytes * (by_step ? r.sequences : 1);
  r.sizes = r.is_pack ? sizes.data() : drawn.data(), r.order = r.is_pack ? order.data() : nullptr;
  std::vector<int64_t> offsets(r.sequences + 1, -7), wanted{0};
  for (int64_t length : drawn) wanted.push_back(wanted.back() + length);
  std::vector<int64_t> plan(r.sequences + 1 + (r.is_pack ? r.sequences + r.steps : 0), -7);
  r.offsets = offsets.data(), r.plan = plan.data();
  int64_t room = r.is_pack ? r.elements : r.sequences * r.steps;
  Bytes table(room * r.row_bytes), flat(r.elements * r.row_bytes), back(flat.size()), again(table.size(), 0xff);
  for (unsigned char& byte : table) byte = (unsigned char)random();
  char message[256] = "";
  auto run = [&](auto function, Bytes& there, Bytes& here) {
    r.threads = 1 + below(random, 4), r.table = there.data(), r.flat = here.data();
    if (function(&r, message, sizeof message) != RAGLANE_OK) std::fprintf(stderr, "failed: %s\n", message), std::exit(1);
  };
  run(raglane_flatten, table, flat);
  r.sizes = r.order = nullptr;  // which are not read again
  run(raglane_scatter, again, flat);
  run(raglane_gather, again, back);
  for (int64_t raglane_rows::*field :
       {&raglane_rows::row_bytes, &raglane_rows::sequence_stride, &raglane_rows::step_stride})
    for (int64_t absurd : {int64_t(1) << 62, int64_t(1) << 61 | 1, INT64_MIN}) {
      raglane_rows other = r;
      other.*field = absurd;
      int64_t rows = field == &raglane_rows::sequence_stride ? r.sequences : r.steps;
      bool is_used = field == &raglane_rows::row_bytes || (!r.is_pack && rows > 1);
      if ((raglane_gather(&other, message, sizeof message) != RAGLANE_OK) == is_used) continue;
      std::fprintf(stderr, "round %d, seed %u: absurd sizes were accepted, or others refused\n", round, seed);
      std::exit(1);
    }
  bool kept = !r.is_pack || again == table;
  if (offsets == wanted && back == flat && kept) return;
  std::fprintf(stderr, "round %d, seed %u: rows came back changed\n", round, seed);
  std::exit(1);
}

// Alignments of frames and labels: the same bits for any number of threads, with and without shares; shares of each
// frame and of each label add up to 1.
template <class real> void check_lattices(std::mt19937& random, int round, unsigned seed) {
  raglane_lattices l{};
  l.abi = RAGLANE_ABI, l.dtype = sizeof(real) == 4 ? RAGLANE_FLOAT32 : RAGLANE_FLOAT64;
  l.sequences = below(random, 6), l.one_per_frame = below(random, 2);
  std::vector<int64_t> frames(l.sequences), labels(l.sequences);
  for (int64_t b = 0; b < l.sequences; b++) {
    frames[b] = below(random, 9), labels[b] = below(random, 5), l.rows += frames[b] * (labels[b] + 1);
  }
  std::vector<real> emissions(2 * l.rows), losses(l.sequences), shares(2 * l.rows), again(l.sequences), other(2 * l.rows);
  for (real& emission : emissions) emission = -(real)below(random, 1000) / 100;
  l.frames = frames.data(), l.labels = labels.data(), l.emissions = emissions.data();
  char message[256] = "";
  auto run = [&](real* to, real* parts, int64_t rows) {
    l.threads = 1 + below(random, 4), l.losses = to, l.shares = parts, l.rows = rows;
    return raglane_align(&l, message, sizeof message);
  };
  const int64_t rows = l.rows;
  bool passed = run(losses.data(), shares.data(), rows) == RAGLANE_OK && run(again.data(), nullptr, rows) == RAGLANE_OK &&
                losses == again && run(again.data(), other.data(), rows) == RAGLANE_OK && losses == again &&
                shares == other && run(again.data(), other.data(), rows + 1) == RAGLANE_BAD_ARGUMENT;
  const real* share = shares.data();
  for (int64_t b = 0; b < l.sequences; b++) {
    double sum = 0;
    for (int64_t i = 0; i < 2 * frames[b] * (labels[b] + 1); i++) sum += *share++;
    double steps = l.one_per_frame ? frames[b] : frames[b] + labels[b];  // of each path
    passed = passed && std::abs(sum - (std::isinf(losses[b]) ? 0 : steps)) < 1e-4;
  }
  if (passed) return;
  std::fprintf(stderr, "round %d, seed %u: wrong alignments. %s\n", round, seed, message);
  std::exit(1);
}

// Products of rows: those of a loop, and of a row alone the same bits.
template <class real> void check_product(std::mt19937& random, int round, unsigned seed) {
  raglane_factors f{};
  f.abi = RAGLANE_ABI, f.isa = any_isa(random), f.dtype = sizeof(real) == 4 ? RAGLANE_FLOAT32 : RAGLANE_FLOAT64;
  f.flags = RAGLANE_POISON, f.threads = 1 + below(random, 4), f.elements = below(random, 40);
  f.groups = 1 + below(random, 3), f.width = 1 + below(random, 70), f.depth = 1 + below(random, 70);
  const int64_t depth = f.groups * f.depth, width = f.groups * f.width;
  std::vector<real> values(f.elements * depth), weight(width * f.depth), output(f.elements * width), alone(width);
  for (std::vector<real>* numbers : {&values, &weight})
    for (real& number : *numbers) number = (real)(below(random, 2001) - 1000) / 1000;
  f.values = {values.data(), f.dtype, {depth, 0, 0}};
  f.weight = {weight.data(), f.dtype, {f.width * f.depth, f.depth, 1}};
  f.output = {output.data(), f.dtype, {width, 0, 0}};
  char message[256] = "";
  bool passed = raglane_product(&f, message, sizeof message) == RAGLANE_OK;
  for (int64_t row = 0; passed && row < f.elements; row++) {
    raglane_factors one = f;
    one.elements = 1, one.values.data = values.data() + row * depth, one.output.data = alone.data();
    passed = raglane_product(&one, message, sizeof message) == RAGLANE_OK &&
             std::equal(alone.begin(), alone.end(), output.begin() + row * width);
    for (int64_t column = 0; passed && column < width; column++) {
      double sum = 0;
      for (int64_t k = 0; k < f.depth; k++)
        sum += (double)values[row * depth + column / f.width * f.depth + k] * weight[column * f.depth + k];
      passed = std::abs(sum - alone[column]) < 1e-4;
    }
  }
  f.depth = 0;
  if (passed && raglane_product(&f, message, sizeof message) == RAGLANE_BAD_ARGUMENT) return;
  std::fprintf(stderr, "round %d, seed %u: wrong products. %s\n", round, seed, message);
  std::exit(1);
}

// States of a program in slots of pools give the same bits; true if they do.
bool check_slots(DrawnProgram& drawn, std::mt19937& random) {
  if (drawn.call.sequences == 0) return true;
  raglane_program p = drawn.call;
  std::vector<raglane_tensor> tensors = drawn.tensors;
  std::vector<Bytes> outputs = drawn.results, got, wanted;
  Pools pools(p.sequences, random);
  const int64_t bytes = bytes_of(p.dtype), states = drawn.states, finals = (int64_t)tensors.size() - states;
  const size_t outs = outputs.size() - states;
  got.reserve(states);
  for (int64_t s = 0; s < states; s++) {
    raglane_tensor& state = tensors[2 + s];
    const int64_t width = state.strides[0];
    got.push_back(pools.filled(state.data, width, bytes, bytes));
    wanted.push_back(pools.filled(outputs[outs + s].data(), width, bytes, bytes));
    state.data = got.back().data(), tensors[finals + s] = {};
  }
  for (size_t o = 0; o < outs; o++) {
    if (!outputs[o].empty()) std::memset(outputs[o].data(), 0xff, outputs[o].size());
    tensors[finals - (int64_t)(outs - o)].data = outputs[o].data();
  }
  p.tensors = tensors.data(), p.slots = pools.slots.data(), p.slot_count = pools.count;
  char message[256] = "";
  const raglane_stage stages[] = {{nullptr, &p}, {}};
  if (raglane_run_stages(stages, 2, p.threads, p.sequences, p.elements, message, sizeof message) != RAGLANE_BAD_ARGUMENT ||
      raglane_run_stages(stages, 1, p.threads, p.sequences, p.elements, message, sizeof message) != RAGLANE_OK)
    std::fprintf(stderr, "a program with slots failed: %s\n", message), std::exit(1);
  return got == wanted && std::equal(outputs.begin(), outputs.begin() + outs, drawn.results.begin());
}

// A program has the same bits on any number of threads, with their own lanes or as a team.
void check_program(std::mt19937& random, int round, unsigned seed) {
  DrawnProgram drawn(random);
  drawn.draw();
  std::vector<Bytes> wanted;
  Packed packed;
  char message[256] = "";
  for (int64_t threads : {1, 2, 3, -2, -3}) {
    drawn.call.flags = RAGLANE_POISON | (threads < 0 ? RAGLANE_TEAM : RAGLANE_NO_TEAM) |
                       (below(random, 2) ? RAGLANE_PREPARE : RAGLANE_FOLD);
    drawn.call.threads = std::abs(threads);
    for (Bytes& bytes : drawn.results)
      if (!bytes.empty()) std::memset(bytes.data(), 0xff, bytes.size());
    if (!packed.memory && below(random, 2)) pack(raglane_pack_program, &drawn.call, packed), drawn.call.packed = packed.memory;
    if (raglane_run_program(&drawn.call, message, sizeof message) != RAGLANE_OK)
      std::fprintf(stderr, "round %d, seed %u: a program failed: %s\n", round, seed, message), std::exit(1);
    if (wanted.empty()) wanted = drawn.results;
    if (drawn.results == wanted && check_slots(drawn, random)) continue;
    std::fprintf(stderr, "round %d, seed %u: a program has other bits with %d threads\n", round, seed, (int)threads);
    std::exit(1);
  }
}

void drive(int rounds, unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; round++) {
    check_rows(random, round, seed);
    check_lattices<float>(random, round, seed);
    check_lattices<double>(random, round, seed);
    check_product<float>(random, round, seed);
    check_product<double>(random, round, seed);
    check_program(random, round, seed);
    DrawnSearch search(random);
    search.check(), check_alignment(search), check_pairs(search);
    DrawnRecurrence scan(random), attention(random);
    scan.check_scan(), attention.check_attention();
    DrawnRecurrence convolution(random), rglru(random), norm(random);
    convolution.check_convolution(), rglru.check_rglru(), norm.check_gated_norm();
    DrawnStep mamba(random), attended(random), block(random);
    mamba.check_mamba(), attended.check_attention(), block.check_block();
    Case c = draw_matrix(random);
    std::vector<Bytes> wanted;
    Packed packed, packed_elementwise;
    for (int64_t flags : {RAGLANE_FOLD | RAGLANE_NO_TEAM, RAGLANE_PREPARE | RAGLANE_NO_TEAM,
                          RAGLANE_PREPARE | RAGLANE_TEAM, RAGLANE_FOLD | RAGLANE_TEAM}) {
      c.layer.flags = RAGLANE_POISON | flags, c.layer.threads = 1 + below(random, 4);
      check(c, wanted, round, seed);
      if (!packed.memory) pack_some(c, packed, random);
      check_slots(c, random, round, seed);
      check_tables(c, random, round, seed);
    }
    Case e = draw_elementwise(random);
    wanted.clear();
    for (int64_t flags : {RAGLANE_NO_TEAM, RAGLANE_TEAM})
      for (int64_t threads : {1, 2, 3, 5}) {
        e.layer.flags = RAGLANE_POISON | flags, e.layer.threads = threads;
        check(e, wanted, round, seed);
        if (!packed_elementwise.memory) pack_some(e, packed_elementwise, random);
        check_slots(e, random, round, seed);
      }
  }
}

}  // namespace

int main(int count, char** words) {
  int rounds = count > 1 ? std::atoi(words[1]) : 300;
  unsigned seed = count > 2 ? (unsigned)std::atoi(words[2]) : 1;
  drive(rounds, seed);
  // From two threads at once, because the kernels share no state.
  std::thread other([=] { drive(rounds / 4, seed + 1); });
  drive(rounds / 4, seed + 2);
  other.join();
  std::printf("%d rounds passed\n", rounds + rounds / 4 * 2);
}
