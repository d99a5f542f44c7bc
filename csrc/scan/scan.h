// What both time loops share: how threads form teams, and the start of all threads.
#pragma once

#include "gemm/products.h"
#include "runtime/threads.h"
#include "scan/lanes.h"

namespace raglane::RAGLANE_TARGET {

// How the threads of a call are divided: first by direction, then into teams of `members`.
struct Division {
  int threads, directions, members;

  Division(int threads, int directions, int wanted) : threads(threads), directions(directions) {
    int least = threads / directions;
    members = wanted < least ? wanted : least > 1 ? least : 1;
  }
  // Teams that serve a direction first of all.
  int teams(int direction) const { return (threads - direction + directions - 1) / directions / members; }

  // The team of a thread in a direction. In its home direction it gets a share dealt out; in another it helps.
  Team team(int thread, int direction, Barrier* barriers) const {
    bool home = thread % directions == direction;
    int place = thread / directions;
    return {place / members, teams(direction), home ? place % members : 0, home ? members : 1, home,
            barriers + slot(thread)};
  }
  bool idle(int thread) const { return thread / directions / members >= teams(thread % directions); }
  // A number of the thread's team among all teams, below the number of threads.
  int slot(int thread) const { return thread / directions / members * directions + thread % directions; }
};

// How many rows are alive at a time, on average, where `teams` share the sequences.
inline double average_rows(const Batch& batch, int64_t teams) {
  return batch.longest == 0 ? 0 : (double)batch.elements / ((double)batch.longest * (double)teams);
}

// How many threads a team needs, of `most`. Lanes of its own are the best that a thread can have, as long as it has
// some: with a row or two it waits for weights, and others may have none. `bytes` of weights are read per step; a wait
// must be worth it.
inline int wanted_members(const Batch& batch, int64_t flags, int64_t bytes, int64_t most) {
  if (most < 2 || (flags & RAGLANE_NO_TEAM)) return 1;
  if (flags & RAGLANE_TEAM) return (int)most;
  double rows = average_rows(batch, most);
  if (rows >= tuning::own_rows || bytes < tuning::team_weights) return 1;
  int64_t wanted = (int64_t)(tuning::team_rows / (rows > tuning::fewest_rows ? rows : tuning::fewest_rows));
  return (int)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

// The same for a layer whose weights are so many panels.
inline int wanted_members(const Call& call, int64_t bytes, int64_t panels) {
  const raglane_layer& layer = *call.layer;
  if (layer.projection_size > 0) return 1;
  int members = wanted_members(call, layer.flags, bytes, layer.threads / call.directions());
  return (int)(members < panels ? members : panels);
}

// One thread's part of a call.
template <class Scan> void work(Scan& scan, int thread, int threads) {
#if defined(RAGLANE_TILES)
  TileRegisters registers;
#endif
  scan.work(thread, threads);
}

// Run scan.work(thread, threads) on all threads.
template <class Scan, class C> void start(Scan& scan, const C& call) {
  on_threads((int)call.layer->threads, [&](int thread, int threads) { work(scan, thread, threads); });
}

// The same for a scan that is made for one call.
template <class Scan, class C> int32_t launch(const C& call) {
  Scan scan(call);
  if (!scan.reserve()) return RAGLANE_OUT_OF_MEMORY;
  start(scan, call);
  return RAGLANE_OK;
}

}  // namespace raglane::RAGLANE_TARGET
