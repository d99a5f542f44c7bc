// Rows between the flat layout of a batch and a padded tensor or a pack. Rows are bytes: no dtype, no instruction set.
#include <algorithm>
#include <cstring>

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
  if (rows.sequences > 0 && !rows.is_pack) present("sizes", rows.sizes);
  if (rows.steps > 0 && rows.is_pack) present("sizes", rows.sizes);
}

// The lengths of a padded tensor's sequences are its sizes.
void measure_padded(const raglane_rows& rows) {
  for (int64_t b = 0; b < rows.sequences; b++) {
    if (rows.sizes[b] < 0 || rows.sizes[b] > rows.steps)
      fail("lengths[%lld]: got %lld; the rule: from 0 to the %lld steps", (long long)b, (long long)rows.sizes[b],
           (long long)rows.steps);
    rows.lengths[b] = rows.sizes[b];
  }
}

// The sequence at some place of a pack's order.
int64_t sequence_at(const raglane_rows& rows, int64_t place) { return rows.order ? rows.order[place] : place; }

// A pack's sizes say how many sequences have each step: none more than the step before it.
void measure_pack(const raglane_rows& rows) {
  std::fill_n(rows.lengths, rows.sequences, int64_t(-1));
  int64_t running = rows.steps > 0 ? rows.sizes[0] : 0;
  if (running > rows.sequences) fail("batch_sizes[0]: got %lld; the rule: at most the sequences", (long long)running);
  for (int64_t place = rows.sequences - 1, step = 0; place >= 0; place--) {
    // From the shortest on: its length is the number of steps that more sequences have than stand before it.
    while (step < rows.steps && rows.sizes[step] > place) step++;
    int64_t sequence = sequence_at(rows, place);
    if (sequence < 0 || sequence >= rows.sequences || rows.lengths[sequence] >= 0)
      fail("sorted_indices[%lld]: got %lld; the rule: each sequence once", (long long)place, (long long)sequence);
    rows.lengths[sequence] = step;
  }
  for (int64_t step = 0; step < rows.steps; step++)
    if (rows.sizes[step] < 1 || (step > 0 && rows.sizes[step] > rows.sizes[step - 1]))
      fail("batch_sizes[%lld]: got %lld; the rule: above 0, and they never rise", (long long)step,
           (long long)rows.sizes[step]);
}

// Lengths and offsets, checked.
void measure(const raglane_rows& rows) {
  if (rows.is_pack) measure_pack(rows);
  else measure_padded(rows);
  int64_t total = rows.offsets[0] = 0;
  for (int64_t b = 0; b < rows.sequences && total <= rows.elements; b++) rows.offsets[b + 1] = total += rows.lengths[b];
  if (total != rows.elements)
    fail("elements: got %lld; the rule: the sum of the lengths", (long long)rows.elements);
}

// Copies one way or the other.
template <bool into_flat> struct Mover {
  const raglane_rows& rows;

  void copy(char* flat, char* table, int64_t count) const {
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
        int64_t begin = b;
        if (rows.sequence_stride == rows.row_bytes)
          while (b + 1 < rows.sequences && t >= rows.lengths[b + 1]) b++;
        fill(table + begin * rows.sequence_stride, b + 1 - begin);
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
    measure(checked);
    move<true>(checked);
  });
}

int32_t raglane_gather(const raglane_rows* rows, char* message, int64_t size) {
  return run(rows, message, size, move<true>);
}

int32_t raglane_scatter(const raglane_rows* rows, char* message, int64_t size) {
  return run(rows, message, size, move<false>);
}
}
