// Rows between the flat layout of a batch and a padded tensor or a pack. Rows are bytes: no dtype, no instruction set.
#include <algorithm>
#include <cstring>
#include <vector>

#include "failure.h"
#include "threads.h"

namespace {

using raglane::at_least;
using raglane::fail;
using raglane::guarded;
using raglane::present;

void check(const raglane_rows& rows) {
  if (rows.abi != RAGLANE_ABI) fail("abi: got %lld; the rule: %d", (long long)rows.abi, RAGLANE_ABI);
  at_least("threads", rows.threads, 1);
  at_least("row_bytes", rows.row_bytes, 0);
  at_least("sequences", rows.sequences, 0);
  at_least("steps", rows.steps, 0);
  at_least("elements", rows.elements, 0);
  // Beyond these no sum below overflows, and no machine has the memory.
  const int64_t most = int64_t(1) << 40;
  if (rows.threads > 4096 || rows.sequences > most || rows.steps > most || rows.elements > most)
    fail("sizes: got more than this kernel was written for");
  present("offsets", rows.offsets);
  if (rows.elements > 0 && rows.row_bytes > 0) present("flat", rows.flat), present("table", rows.table);
  if (rows.sequences > 0) present("lengths", rows.lengths);
  if ((rows.is_pack ? rows.steps : rows.sequences) > 0) present("sizes", rows.sizes);
}

// Where lengths and offsets are written.
struct Measures {
  int64_t *lengths, *offsets;
};

// The lengths of a padded tensor's sequences are its sizes.
void measure_padded(const raglane_rows& rows, const int64_t* sizes, int64_t* lengths) {
  for (int64_t b = 0; b < rows.sequences; b++) {
    if (sizes[b] < 0 || sizes[b] > rows.steps)
      fail("lengths[%lld]: got %lld; the rule: from 0 to the %lld steps", (long long)b, (long long)sizes[b],
           (long long)rows.steps);
    lengths[b] = sizes[b];
  }
}

// The sequence at some place of a pack's order.
int64_t sequence_at(const raglane_rows& rows, int64_t place) { return rows.order ? rows.order[place] : place; }

// A pack's sizes say how many sequences have each step: none more than the step before it.
void measure_pack(const raglane_rows& rows, int64_t* lengths) {
  std::fill_n(lengths, rows.sequences, int64_t(-1));
  int64_t running = rows.steps > 0 ? rows.sizes[0] : 0;
  if (running > rows.sequences) fail("batch_sizes[0]: got %lld; the rule: at most the sequences", (long long)running);
  for (int64_t place = rows.sequences - 1, step = 0; place >= 0; place--) {
    // From the shortest on: its length is the number of steps that more sequences have than stand before it.
    while (step < rows.steps && rows.sizes[step] > place) step++;
    int64_t sequence = sequence_at(rows, place);
    if (sequence < 0 || sequence >= rows.sequences || lengths[sequence] >= 0)
      fail("sorted_indices[%lld]: got %lld; the rule: each sequence once", (long long)place, (long long)sequence);
    lengths[sequence] = step;
  }
  for (int64_t step = 0; step < rows.steps; step++)
    if (rows.sizes[step] < 1 || (step > 0 && rows.sizes[step] > rows.sizes[step - 1]))
      fail("batch_sizes[%lld]: got %lld; the rule: above 0, and they never rise", (long long)step,
           (long long)rows.sizes[step]);
}

// Lengths and offsets of a pack, or of a padded tensor with these lengths, checked.
void measure(const raglane_rows& rows, const int64_t* padded_lengths, const Measures& to) {
  if (rows.is_pack) measure_pack(rows, to.lengths);
  else measure_padded(rows, padded_lengths, to.lengths);
  int64_t total = to.offsets[0] = 0;
  for (int64_t b = 0; b < rows.sequences && total <= rows.elements; b++) to.offsets[b + 1] = total += to.lengths[b];
  if (total != rows.elements)
    fail("elements: got %lld; the rule: the sum of the lengths", (long long)rows.elements);
}

// Whether lengths and offsets are still what they were measured to be: nothing else keeps a caller who changed his
// tensors between two calls from reaching memory that is not his.
void check_measures(const raglane_rows& rows) {
  std::vector<int64_t> memory(2 * rows.sequences + 1);
  Measures again{memory.data(), memory.data() + rows.sequences};
  measure(rows, rows.lengths, again);
  if (!std::equal(rows.lengths, rows.lengths + rows.sequences, again.lengths) ||
      !std::equal(rows.offsets, rows.offsets + rows.sequences + 1, again.offsets))
    fail("lengths, offsets: they changed since raglane_flatten wrote them");
}

// Copies one way or the other.
template <bool into_flat> struct Mover {
  const raglane_rows& rows;

  void copy(char* flat, char* table, int64_t count) const {
    if (count == 0) return;  // where there may be no memory either
    if (into_flat) std::memcpy(flat, table, count * rows.row_bytes);
    else std::memcpy(table, flat, count * rows.row_bytes);
  }
  char* flat(int64_t sequence, int64_t step) const {
    return (char*)rows.flat + (rows.offsets[sequence] + step) * rows.row_bytes;
  }
  void fill(char* table, int64_t count) const {
    if (!into_flat && count > 0) std::memset(table, 0, count * rows.row_bytes);
  }

  // Sequences [begin, end) of a padded tensor whose steps follow each other.
  void sequences(int64_t begin, int64_t end) const {
    for (int64_t b = begin; b < end; b++) {
      char* table = (char*)rows.table + b * rows.sequence_stride;
      int64_t length = rows.lengths[b];
      if (rows.step_stride == rows.row_bytes) {
        copy(flat(b, 0), table, length);
        fill(table + length * rows.row_bytes, rows.steps - length);
        continue;
      }
      for (int64_t t = 0; t < length; t++) copy(flat(b, t), table + t * rows.step_stride, 1);
      for (int64_t t = length; t < rows.steps; t++) fill(table + t * rows.step_stride, 1);
    }
  }

  // Steps [begin, end) of a padded tensor whose sequences lie side by side.
  void steps(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; t++) {
      char* table = (char*)rows.table + t * rows.step_stride;
      for (int64_t b = 0; b < rows.sequences; b++) {
        if (t < rows.lengths[b]) {
          copy(flat(b, t), table + b * rows.sequence_stride, 1);
          continue;
        }
        int64_t first = b;  // of neighbours that have ended
        if (rows.sequence_stride == rows.row_bytes)
          while (b + 1 < rows.sequences && t >= rows.lengths[b + 1]) b++;
        fill(table + first * rows.sequence_stride, b + 1 - first);
      }
    }
  }

  // Rows [begin, end) of a pack.
  void packed(int64_t begin, int64_t end) const {
    for (int64_t t = 0, before = 0; t < rows.steps && before < end; before += rows.sizes[t++])
      for (int64_t row = std::max(begin, before); row < std::min(end, before + rows.sizes[t]); row++)
        copy(flat(sequence_at(rows, row - before), t), (char*)rows.table + row * rows.row_bytes, 1);
  }
};

template <bool into_flat> void move(const raglane_rows& rows) {
  if (rows.row_bytes == 0) return;
  bool by_step = rows.step_stride > rows.sequence_stride;
  int64_t parts = rows.is_pack ? rows.elements : by_step ? rows.steps : rows.sequences;
  int64_t bytes = rows.row_bytes * (into_flat || rows.is_pack ? rows.elements : rows.sequences * rows.steps);
  // Below so many bytes a thread, starting it takes longer than what it saves.
  int64_t useful = std::min(std::min(rows.threads, parts), 1 + bytes / (256 << 10));
  Mover<into_flat> mover{rows};
  raglane::on_threads((int)std::max<int64_t>(useful, 1), [&](int thread, int threads) {
    int64_t begin = parts * thread / threads, end = parts * (thread + 1) / threads;
    if (rows.is_pack) mover.packed(begin, end);
    else if (by_step) mover.steps(begin, end);
    else mover.sequences(begin, end);
  });
}

// Check a call, and run body(rows).
template <class Body> int32_t run(const raglane_rows* rows, char* message, int64_t size, Body&& body) {
  return guarded(message, size, [&] {
    present("rows", rows);
    check(*rows);
    body(*rows);
    return RAGLANE_OK;
  });
}

}  // namespace

extern "C" {

int32_t raglane_flatten(const raglane_rows* rows, char* message, int64_t size) {
  return run(rows, message, size, [](const raglane_rows& checked) {
    measure(checked, checked.sizes, {checked.lengths, checked.offsets});
    move<true>(checked);
  });
}

int32_t raglane_gather(const raglane_rows* rows, char* message, int64_t size) {
  return run(rows, message, size, [](const raglane_rows& checked) {
    check_measures(checked);
    move<true>(checked);
  });
}

int32_t raglane_scatter(const raglane_rows* rows, char* message, int64_t size) {
  return run(rows, message, size, [](const raglane_rows& checked) {
    check_measures(checked);
    move<false>(checked);
  });
}
}
