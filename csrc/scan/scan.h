// Shared by both time loops: how threads form teams, and the start of all threads.
#pragma once

#include "gemm/products.h"
#include "runtime/threads.h"
#include "scan/lanes.h"

namespace raglane::RAGLANE_TARGET {

// Division of the threads of a call: first by direction, then into teams of `members`.
struct Division {
  int threads, directions, members;

  Division(int threads, int directions, int wanted) : threads(threads), directions(directions) {
    int least = threads / directions;
    members = wanted < least ? wanted : least > 1 ? least : 1;
  }
  // Teams whose home is a direction.
  int teams(int direction) const { return (threads - direction + directions - 1) / directions / members; }

  // The team of a thread in a direction. It has a fixed share in its home direction, and helps in the other.
  Team team(int thread, int direction, Barrier* barriers) const {
    bool home = thread % directions == direction;
    int place = thread / directions;
    return {place / members, teams(direction), home ? place % members : 0, home ? members : 1, home,
            barriers + slot(thread)};
  }
  bool idle(int thread) const { return thread / directions / members >= teams(thread % directions); }
  // Index of the thread's team among all teams, below the number of threads.
  int slot(int thread) const { return thread / directions / members * directions + thread % directions; }
};

// The average number of active rows, if `teams` share the sequences.
inline double average_rows(const Batch& batch, int64_t teams) {
  return batch.longest == 0 ? 0 : (double)batch.elements / ((double)batch.longest * (double)teams);
}

// The number of threads of a team, at most `most`. Own lanes are best for a thread if there are enough of them: with
// one or two rows it waits for weights, and other threads may have no rows. `bytes` of weights are read per step; they
// must be worth a barrier per step. If a core's cache cannot hold them, a thread needs more rows of its own.
inline int wanted_members(const Batch& batch, int64_t flags, int64_t bytes, int64_t most) {
  if (most < 2 || (flags & RAGLANE_NO_TEAM)) return 1;
  if (flags & RAGLANE_TEAM) return (int)most;
  const bool fits = bytes <= batch.cache / (register_rows == 16 ? tuning::held_of_cache_in_tiles : 1);
  const double own = fits ? tuning::own_rows : tuning::own_tiles * register_rows;
  double rows = average_rows(batch, most);
  if (rows >= own || bytes < tuning::team_weights) return 1;
  int64_t wanted = (int64_t)(2 * own / (rows > tuning::fewest_rows ? rows : tuning::fewest_rows));
  return (int)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

// The same for a layer with a number of panels of weights.
inline int wanted_members(const Call& call, int64_t bytes, int64_t panels) {
  const raglane_layer& layer = *call.layer;
  if (layer.projection_size > 0) return 1;
  int members = wanted_members(call, layer.flags, bytes, layer.threads / call.directions());
  return (int)(members < panels ? members : panels);
}

// The part of one thread in a call.
template <class Scan> void work(Scan& scan, int thread, int threads) {
#if defined(RAGLANE_TILES)
  TileRegisters registers;
#endif
  scan.work(thread, threads);
}

// Run scan.work(thread, threads) on all threads.
template <class Scan> void start(Scan& scan, int64_t threads) {
  on_threads((int)threads, [&](int thread, int threads) { work(scan, thread, threads); });
}

// The same for a scan constructed for one call.
template <class Scan, class C> int32_t launch(const C& call) {
  Scan scan(call);
  if (!scan.reserve()) return RAGLANE_OUT_OF_MEMORY;
  start(scan, call.layer->threads);
  return RAGLANE_OK;
}

template <class C, int32_t (*RUN)(const C&)> Walk walk_of(const C& call) {
  return {&call, [](const void* of) { return RUN(*(const C*)of); }};
}

}  // namespace raglane::RAGLANE_TARGET
