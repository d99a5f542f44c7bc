// The losses of transducers: sums over the alignments of frames and labels, of one sequence at a time.
#include <algorithm>
#include <atomic>
#include <vector>

#include "abi/failure.h"
#include "runtime/threads.h"
#include "transduction/lattice.h"

namespace {

using raglane::at_least;
using raglane::fail;
using raglane::Lattice;
using raglane::most_threads;
using raglane::present;

// Copies of the lengths, checked, and the first row of each sequence.
struct Lengths {
  std::vector<int64_t> frames, labels, first;
  int64_t most_labels = 0;

  explicit Lengths(const raglane_lattices& call)
      : frames(call.sequences), labels(call.sequences), first(call.sequences + 1) {
    for (int64_t b = 0, row = 0; b < call.sequences; b++) {
      frames[b] = call.frames[b], labels[b] = call.labels[b];
      if (frames[b] < 0 || labels[b] < 0 || labels[b] >= most)
        fail("frames, labels must be lengths of at least 0, got %lld and %lld for sequence %lld", (long long)frames[b],
             (long long)labels[b], (long long)b);
      if (frames[b] > (call.rows - row) / (labels[b] + 1))
        fail("rows must be the sum of frames * (labels + 1), got %lld", (long long)call.rows);
      row += frames[b] * (labels[b] + 1);
      first[b + 1] = row;
      most_labels = std::max(most_labels, labels[b]);
    }
    if (first[call.sequences] != call.rows)
      fail("rows must be the sum of frames * (labels + 1), got %lld", (long long)call.rows);
  }

  static constexpr int64_t most = int64_t(1) << 40;  // beyond it no machine has the memory
};

void check(const raglane_lattices& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  at_least("threads", call.threads, 1);
  at_least("sequences", call.sequences, 0);
  at_least("rows", call.rows, 0);
  if (call.threads > most_threads || call.sequences > Lengths::most || call.rows > Lengths::most)
    fail("sizes must be at most those that this kernel supports, got more");
  if (call.dtype != RAGLANE_FLOAT32 && call.dtype != RAGLANE_FLOAT64)
    fail("dtype must be RAGLANE_FLOAT32 or RAGLANE_FLOAT64, got %lld", (long long)call.dtype);
  if (call.sequences > 0) {
    present("frames", call.frames);
    present("labels", call.labels);
    present("losses", call.losses);
  }
  if (call.rows > 0) present("emissions", call.emissions);
}

template <class real> void align(const raglane_lattices& call) {
  const Lengths lengths(call);
  const int64_t columns = lengths.most_labels + 1;
  const int threads = (int)std::min(call.threads, std::max<int64_t>(call.sequences, 1));
  // Of each thread a row; with shares also alpha.
  std::vector<double> rows(threads * columns), alpha(call.shares ? call.rows : 0);
  std::atomic<int64_t> next{0};
  raglane::on_threads(threads, [&](int thread, int) {
    double* row = rows.data() + thread * columns;
    for (int64_t b; (b = next++) < call.sequences;) {
      const int64_t first = lengths.first[b];
      const Lattice<real> lattice{lengths.frames[b], lengths.labels[b], call.one_per_frame != 0,
                                  (const real*)call.emissions + 2 * first};
      double* forward = call.shares ? alpha.data() + first : row;
      const double whole = lattice.forward(forward, call.shares ? lengths.labels[b] + 1 : 0);
      ((real*)call.losses)[b] = (real)(0 - whole);
      if (call.shares) lattice.backward(forward, whole, row, (real*)call.shares + 2 * first);
    }
  });
}

}  // namespace

extern "C" int32_t raglane_align(const raglane_lattices* lattices, char* message, int64_t size) {
  return raglane::guarded(message, size, [&] {
    present("lattices", lattices);
    const raglane_lattices call = *lattices;
    check(call);
    call.dtype == RAGLANE_FLOAT32 ? align<float>(call) : align<double>(call);
    return (int32_t)RAGLANE_OK;
  });
}
