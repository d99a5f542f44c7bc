// Assigns sequences to lanes at each step, and lanes to threads.
//
// A team is one thread, or several that share their lanes and divide the hidden units. A team holds up to
// `capacity` lanes; a lane runs one sequence and then takes the next one, longest first. The active
// lanes are contiguous, at the front.
//
// NOTE (teams): every thread of a team keeps its own LaneSet, and all of them go through the same states. This
// requires a source of sequences that gives each thread the same answers: with several threads per team, a
// fixed share of the order instead of the shared counter.
#pragma once

#include "abi/call.h"
#include "gemm/gemm.h"
#include "runtime/barrier.h"

namespace raglane::RAGLANE_TARGET {

// The sequences of one direction that are not assigned to a team.
struct alignas(64) Queue {
  int64_t taken = 0;
};

struct Team {
  int index, count;      // index of this team among those of the direction, and their number
  int member, members;   // index of this thread in the team, and the number of its threads
  bool dealt;            // this team begins with a fixed share; otherwise it takes all from the counter
  Barrier* barrier;
};

inline constexpr int most_lanes = register_rows == 16 ? tuning::most_lanes_in_tiles : tuning::most_lanes;
inline constexpr int even_lanes = register_rows == 3 ? 6 : register_rows;  // multiples of this fill all tiles

// The number of lanes of a team: just enough to finish with the longest sequence, plus a margin,
// so that rows are used evenly.
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
  int64_t element[most_lanes];  // the index in the values of the element that the lane computes
  int64_t left[most_lanes];     // number of remaining elements of the sequence, including that one

  // `ascending`: elements are computed from the start of a sequence to its end.
  LaneSet(const Batch& batch, const Team& team, Queue* queue, int capacity, bool ascending)
      : batch_(batch), team_(team), queue_(queue), capacity_(capacity), step_(ascending ? 1 : -1) {}

  // The row of each lane's element in values and output.
  const int64_t* row() const { return batch_.rows ? row_ : element; }

  // Take up to `capacity` sequences; begin(lane) is called for each.
  template <class Begin> void fill(Begin&& begin) {
    while (active < capacity_ && take(active)) begin(active++);
  }

  // Advance to the next step. finish(lane) is called for a lane whose sequence ended, then begin(lane) if it takes
  // another one. Otherwise the last active lane moves to its place: move(from, to).
  template <class Finish, class Begin, class Move> void advance(Finish&& finish, Begin&& begin, Move&& move) {
    at_once_ = 0;
    for (int lane = 0; lane < active;) {
      if (--left[lane] > 0) {
        element[lane] += step_;
        if (batch_.rows) find_row(lane);
        lane++;
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
      if (batch_.rows) row_[lane] = row_[last];
      move(last, lane);
    }
  }

 private:
  const Batch& batch_;
  const Team& team_;
  Queue* queue_;
  int capacity_;
  int64_t step_;
  int64_t row_[most_lanes];  // in a table
  int64_t share_ = 0;
  int64_t worked_ = 0;   // number of elements of its sequences
  int64_t at_once_ = 0;  // number of sequences taken from the counter at this step

  bool take(int lane) {
    int64_t place = next();
    if (place >= batch_.ordered) return false;
    int64_t taken = batch_.order[place], begin = batch_.begins[taken], end = batch_.ends[taken];
    sequence[lane] = taken;
    left[lane] = end - begin;
    worked_ += end - begin;
    element[lane] = step_ > 0 ? begin : end - 1;
    if (batch_.rows) find_row(lane);
    return true;
  }

  void find_row(int lane) {
    row_[lane] = batch_.rows[sequence[lane]] + batch_.starts[element[lane] - batch_.begins[sequence[lane]]];
  }

  // The first sequences are assigned in alternating order of teams, so that none gets all the long ones.
  int64_t next() {
    bool fixed = team_.dealt && (team_.members > 1 || share_ < capacity_);
    if (fixed) {
      int64_t round = share_++;
      return round * team_.count + (round % 2 ? team_.count - 1 - team_.index : team_.index);
    }
    const int64_t dealt = (int64_t)team_.count * capacity_;
    // If many lanes end at the same step, a team that has its share of the work does not fill all of them, to leave
    // sequences for the other teams, whose lanes end now too.
    if (team_.dealt && worked_ * team_.count >= batch_.elements) {
      int64_t waiting = batch_.ordered - dealt - __atomic_load_n(&queue_->taken, __ATOMIC_RELAXED);
      if (at_once_ * (team_.count - 1) >= waiting) return batch_.ordered;
    }
    at_once_++;
    return dealt + __atomic_fetch_add(&queue_->taken, 1, __ATOMIC_RELAXED);
  }
};

}  // namespace raglane::RAGLANE_TARGET
