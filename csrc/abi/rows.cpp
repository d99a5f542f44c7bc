// Rows between the flat layout of a batch and a padded tensor or a pack. Rows are bytes: no dtype, no instruction set.
#include <algorithm>
#include <cstring>
#include <vector>

#include "abi/failure.h"
#include "runtime/threads.h"
#include "runtime/tuning.h"

namespace {

using raglane::at_least;
using raglane::fail;
using raglane::guarded;
using raglane::most_threads;
using raglane::present;

enum Way { into_flat, into_table, into_padding };

void check(const raglane_rows& rows, Way way) {
  if (rows.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)rows.abi);
  at_least("threads", rows.threads, 1);
  at_least("row_bytes", rows.row_bytes, 0);
  at_least("sequences", rows.sequences, 0);
  at_least("steps", rows.steps, 0);
  at_least("elements", rows.elements, 0);
  // One row has no stride.
  const int64_t between_sequences = rows.is_pack || rows.sequences < 2 ? 0 : rows.sequence_stride;
  const int64_t between_steps = rows.is_pack || rows.steps < 2 ? 0 : rows.step_stride;
  at_least("sequence_stride", between_sequences, 0);
  at_least("step_stride", between_steps, 0);
  // Within these limits nothing below overflows; beyond them no machine has the memory.
  const double most = 1ll << 40, most_bytes = 1ll << 60;
  const double places = rows.is_pack ? rows.elements : std::max((double)rows.sequences * rows.steps, (double)rows.elements);
  const double reach = (double)rows.sequences * between_sequences + (double)rows.steps * between_steps;
  if (rows.threads > most_threads || std::max({rows.sequences, rows.steps, rows.elements}) > most ||
      std::max(places * rows.row_bytes, std::max(reach, (double)rows.row_bytes)) > most_bytes)
    fail("sizes must be at most those that this kernel supports, got more");
  if (way != into_padding && rows.elements > 0 && rows.row_bytes > 0) present("flat", rows.flat);
  bool has_table = rows.is_pack ? rows.elements > 0 : rows.sequences > 0 && rows.steps > 0;
  if (has_table && rows.row_bytes > 0) present("table", rows.table);
  present("plan", rows.plan);
}

// The positions of the elements of each sequence, as copies of the caller's numbers, so that another thread that writes
// to these after the check cannot cause accesses out of bounds.
class Plan {
 public:
  // From sizes and order.
  static Plan made(const raglane_rows& rows) {
    present("offsets", rows.offsets);
    if ((rows.is_pack ? rows.steps : rows.sequences) > 0) present("sizes", rows.sizes);
    Plan plan(rows);
    std::vector<int64_t> lengths;
    if (rows.is_pack) {
      for (int64_t b = 0; b < rows.sequences; b++) plan.order()[b] = rows.order ? rows.order[b] : b;
      std::copy_n(rows.sizes, rows.steps, plan.sizes());
      lengths = plan.lengths_of_pack();
    } else {
      lengths.assign(rows.sizes, rows.sizes + rows.sequences);
    }
    plan.place(lengths, plan.numbers_.data());
    std::copy_n(plan.offsets(), rows.sequences + 1, rows.offsets);
    std::copy(plan.numbers_.begin(), plan.numbers_.end(), rows.plan);
    return plan;
  }

  // From a plan that made() wrote.
  static Plan kept(const raglane_rows& rows) {
    Plan plan(rows);
    std::copy_n(rows.plan, plan.numbers_.size(), plan.numbers_.begin());
    std::vector<int64_t> lengths, again(rows.sequences + 1);
    if (rows.is_pack) lengths = plan.lengths_of_pack();
    else
      for (int64_t b = 0; b < rows.sequences; b++)
        lengths.push_back((int64_t)((uint64_t)plan.offsets()[b + 1] - (uint64_t)plan.offsets()[b]));
    plan.place(lengths, again.data());
    if (!std::equal(again.begin(), again.end(), plan.offsets()))
      fail("plan must be unchanged since raglane_flatten wrote it");
    return plan;
  }

  const int64_t* offsets() const { return numbers_.data(); }
  int64_t length(int64_t sequence) const { return offsets()[sequence + 1] - offsets()[sequence]; }
  // For a pack: its sequences, longest first, and the number of sequences with each step.
  const int64_t* order() const { return offsets() + rows_.sequences + 1; }
  const int64_t* sizes() const { return order() + rows_.sequences; }

 private:
  const raglane_rows& rows_;
  std::vector<int64_t> numbers_;

  explicit Plan(const raglane_rows& rows)
      : rows_(rows), numbers_(rows.is_pack ? 2 * rows.sequences + 1 + rows.steps : rows.sequences + 1) {}
  int64_t* order() { return numbers_.data() + rows_.sequences + 1; }
  int64_t* sizes() { return order() + rows_.sequences; }

  // A pack's sizes are the numbers of sequences with each step; they never increase.
  std::vector<int64_t> lengths_of_pack() const {
    std::vector<int64_t> lengths(rows_.sequences, -1);
    int64_t running = rows_.steps > 0 ? sizes()[0] : 0;
    if (running > rows_.sequences)
      fail("batch_sizes[0] must be at most the number of sequences, got %lld", (long long)running);
    for (int64_t place = rows_.sequences - 1, step = 0; place >= 0; place--) {
      // From the shortest: its length is the number of steps that more sequences have than precede it.
      while (step < rows_.steps && sizes()[step] > place) step++;
      int64_t sequence = order()[place];
      if (sequence < 0 || sequence >= rows_.sequences || lengths[sequence] >= 0)
        fail("sorted_indices[%lld] must be a place that occurs once, got %lld", (long long)place, (long long)sequence);
      lengths[sequence] = step;
    }
    for (int64_t step = 0; step < rows_.steps; step++)
      if (sizes()[step] < 1 || (step > 0 && sizes()[step] > sizes()[step - 1]))
        fail("batch_sizes[%lld] must be above 0 and at most the one before, got %lld", (long long)step,
            (long long)sizes()[step]);
    return lengths;
  }

  // The offsets of sequences of these lengths, with a check.
  void place(const std::vector<int64_t>& lengths, int64_t* offsets) const {
    int64_t total = offsets[0] = 0;
    for (int64_t b = 0; b < rows_.sequences && total <= rows_.elements; b++) {
      if (lengths[b] < 0 || lengths[b] > rows_.steps)
        fail("lengths[%lld] must be from 0 to the %lld steps, got %lld", (long long)b, (long long)rows_.steps,
            (long long)lengths[b]);
      offsets[b + 1] = total += lengths[b];
    }
    if (total != rows_.elements)
      fail("elements must be the sum of the lengths, got %lld", (long long)rows_.elements);
  }
};

// Copies in one direction or the other, or only writes zeros to padding.
template <Way way> struct Mover {
  const raglane_rows& rows;
  const Plan& plan;

  void copy(char* flat, char* table, int64_t count) const {
    if (count == 0 || way == into_padding) return;  // memory may be null
    if (way == into_flat) std::memcpy(flat, table, count * rows.row_bytes);
    else std::memcpy(table, flat, count * rows.row_bytes);
  }
  char* flat(int64_t sequence, int64_t step) const {
    return (char*)rows.flat + (plan.offsets()[sequence] + step) * rows.row_bytes;
  }
  void fill(char* table, int64_t count) const {
    if (way != into_flat && count > 0) std::memset(table, 0, count * rows.row_bytes);
  }

  // Sequences [begin, end) of a padded tensor with contiguous sequences.
  void sequences(int64_t begin, int64_t end) const {
    for (int64_t b = begin; b < end; b++) {
      char* table = (char*)rows.table + b * rows.sequence_stride;
      int64_t length = plan.length(b);
      if (rows.step_stride == rows.row_bytes) {
        copy(flat(b, 0), table, length);
        fill(table + length * rows.row_bytes, rows.steps - length);
        continue;
      }
      for (int64_t t = 0; t < length; t++) copy(flat(b, t), table + t * rows.step_stride, 1);
      for (int64_t t = length; t < rows.steps; t++) fill(table + t * rows.step_stride, 1);
    }
  }

  // Steps [begin, end) of a padded tensor with contiguous steps.
  void steps(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; t++) {
      char* table = (char*)rows.table + t * rows.step_stride;
      for (int64_t b = 0; b < rows.sequences; b++) {
        if (t < plan.length(b)) {
          copy(flat(b, t), table + b * rows.sequence_stride, 1);
          continue;
        }
        int64_t first = b;  // of adjacent sequences that have ended
        if (rows.sequence_stride == rows.row_bytes)
          while (b + 1 < rows.sequences && t >= plan.length(b + 1)) b++;
        fill(table + first * rows.sequence_stride, b + 1 - first);
      }
    }
  }

  // Rows [begin, end) of a pack.
  void packed(int64_t begin, int64_t end) const {
    const int64_t *order = plan.order(), *sizes = plan.sizes();
    for (int64_t t = 0, before = 0; t < rows.steps && before < end; before += sizes[t++])
      for (int64_t row = std::max(begin, before); row < std::min(end, before + sizes[t]); row++)
        copy(flat(order[row - before], t), (char*)rows.table + row * rows.row_bytes, 1);
  }
};

template <Way way> void move(const raglane_rows& rows, const Plan& plan) {
  if (rows.row_bytes == 0) return;
  bool by_step = rows.step_stride > rows.sequence_stride;
  int64_t parts = rows.is_pack ? rows.elements : by_step ? rows.steps : rows.sequences;
  int64_t bytes = rows.row_bytes * (way == into_flat || rows.is_pack ? rows.elements : rows.sequences * rows.steps);
  // For fewer bytes per thread, starting it takes longer than it saves.
  int64_t useful = std::min(std::min(rows.threads, parts), 1 + bytes / raglane::tuning::thread_bytes);
  Mover<way> mover{rows, plan};
  raglane::on_threads((int)std::max<int64_t>(useful, 1), [&](int thread, int threads) {
    int64_t begin = parts * thread / threads, end = parts * (thread + 1) / threads;
    if (rows.is_pack) mover.packed(begin, end);
    else if (by_step) mover.steps(begin, end);
    else mover.sequences(begin, end);
  });
}

// Check a call, and run it with a copy.
template <Way way> int32_t run(const raglane_rows* rows, Plan (*plan)(const raglane_rows&), char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("rows", rows);
    const raglane_rows mine = *rows;
    check(mine, way);
    move<way>(mine, plan(mine));
    return RAGLANE_OK;
  });
}

}  // namespace

extern "C" {

int32_t raglane_flatten(const raglane_rows* rows, char* message, int64_t size) {
  return run<into_flat>(rows, Plan::made, message, size);
}

int32_t raglane_gather(const raglane_rows* rows, char* message, int64_t size) {
  return run<into_flat>(rows, Plan::kept, message, size);
}

int32_t raglane_scatter(const raglane_rows* rows, char* message, int64_t size) {
  return run<into_table>(rows, Plan::kept, message, size);
}

int32_t raglane_fill(const raglane_rows* rows, char* message, int64_t size) {
  return run<into_padding>(rows, Plan::kept, message, size);
}
}
