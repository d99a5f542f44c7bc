// Which sequence runs in which lane at which step, and who works on it.
//
// A team is one thread, or several that share their lanes and divide the hidden units among them. A team holds up to
// `capacity` lanes; a lane works through one sequence and then takes the next that waits, longest first. The live
// lanes stand together at the front.
//
// NOTE (teams): every thread of a team keeps a LaneSet of its own, and all of them go through the same sequence of
// states. That needs a source of sequences that gives each the same answers: with several threads per team, a
// fixed share of the order in place of the shared counter.
#pragma once

#include "abi/call.h"
#include "gemm/gemm.h"
#include "runtime/barrier.h"

namespace raglane::RAGLANE_TARGET {

// The sequences of one direction that no team has taken.
struct alignas(64) Queue {
  int64_t taken = 0;
};

struct Team {
  int index, count;      // this team among those that serve the direction, and how many they are
  int member, members;   // this thread among those of the team
  bool dealt;            // this team has a share dealt out; else it only takes from the counter
  Barrier* barrier;
};

using tuning::most_lanes;
inline constexpr int even_lanes = tile_rows == 3 ? 6 : tile_rows;  // as many, or a multiple, leave no tile half full

// How many lanes a team should hold: so many that the work is done when the longest sequence is, with some to spare,
// and no more, so that the rows are used evenly.
inline int lane_capacity(const Batch& batch, int64_t teams, int64_t row_bytes) {
  if (batch.ordered == 0) return 1;
  int64_t needed = (int64_t)(tuning::lane_surplus * (double)batch.elements / (double)(teams * batch.longest)) + 1;
  int64_t share = (batch.ordered + teams - 1) / teams;
  int64_t most = batch.cache / tuning::lanes_of_cache / row_bytes / even_lanes * even_lanes;
  most = most < tuning::least_most ? tuning::least_most : most > most_lanes ? most_lanes : most;
  int64_t lanes = (needed + even_lanes - 1) / even_lanes * even_lanes;
  lanes = lanes < most ? lanes : most;
  return (int)(lanes < share ? lanes : share);
}

class LaneSet {
 public:
  int active = 0;
  int64_t sequence[most_lanes];
  int64_t element[most_lanes];  // the row of the values that the lane computes now
  int64_t left[most_lanes];     // how many elements of the sequence remain, that one included

  // `ascending`: elements are computed from a sequence's start to its end.
  LaneSet(const Batch& batch, const Team& team, Queue* queue, int capacity, bool ascending)
      : batch_(batch), team_(team), queue_(queue), capacity_(capacity), step_(ascending ? 1 : -1) {}

  // Take up to `capacity` sequences; begin(lane) is called for each.
  template <class Begin> void fill(Begin&& begin) {
    while (active < capacity_ && take(active)) begin(active++);
  }

  // Go to the next step. finish(lane) is called for a lane whose sequence ended, then begin(lane) if it takes another;
  // else the last live lane moves into its place: move(from, to).
  template <class Finish, class Begin, class Move> void advance(Finish&& finish, Begin&& begin, Move&& move) {
    at_once_ = 0;
    for (int lane = 0; lane < active;) {
      if (--left[lane] > 0) {
        element[lane++] += step_;
        continue;
      }
      finish(lane);
      if (take(lane)) {
        begin(lane++);
        continue;
      }
      int last = --active;
      if (last == lane) continue;
      sequence[lane] = sequence[last], element[lane] = element[last], left[lane] = left[last];
      move(last, lane);
    }
  }

 private:
  const Batch& batch_;
  const Team& team_;
  Queue* queue_;
  int capacity_;
  int64_t step_;
  int64_t share_ = 0;
  int64_t worked_ = 0;   // elements of what it has taken
  int64_t at_once_ = 0;  // how many it has taken from the counter at this step

  bool take(int lane) {
    int64_t place = next();
    if (place >= batch_.ordered) return false;
    int64_t taken = batch_.order[place], begin = batch_.begins[taken], end = batch_.ends[taken];
    sequence[lane] = taken;
    left[lane] = end - begin;
    worked_ += end - begin;
    element[lane] = step_ > 0 ? begin : end - 1;
    return true;
  }

  // The first sequences are dealt out like cards, back and forth, so that no team holds all the long ones.
  int64_t next() {
    bool fixed = team_.dealt && (team_.members > 1 || share_ < capacity_);
    if (fixed) {
      int64_t round = share_++;
      return round * team_.count + (round % 2 ? team_.count - 1 - team_.index : team_.index);
    }
    const int64_t dealt = (int64_t)team_.count * capacity_;
    // Where many lanes end at once, a team that has its share of the work would fill them all, and leave few to the
    // others, whose lanes end now, too.
    if (team_.dealt && worked_ * team_.count >= batch_.elements) {
      int64_t waiting = batch_.ordered - dealt - __atomic_load_n(&queue_->taken, __ATOMIC_RELAXED);
      if (at_once_ * (team_.count - 1) >= waiting) return batch_.ordered;
    }
    at_once_++;
    return dealt + __atomic_fetch_add(&queue_->taken, 1, __ATOMIC_RELAXED);
  }
};

}  // namespace raglane::RAGLANE_TARGET
