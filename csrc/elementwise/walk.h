// Shared by both element-wise loops: the division of their work, and the order of its rows.
//
// Units are independent, so a piece of work is a range of sequences times a range of units. Rows are processed in the
// order of memory, or its reverse, all units of a row before the next row: memory is read and
// written as one stream, whose bandwidth limits these loops.
#pragma once

#include "cells/elementwise.h"
#include "scan/scan.h"

namespace raglane::RAGLANE_TARGET {

// Vectors of units whose arithmetic is interleaved; more for short arithmetic.
template <class Cell> inline constexpr int interleaved = registers == 32 && Cell::gates == 1 ? 4 : 2;

// The rows of one sequence among those of a chunk; `first` is computed first.
struct Piece {
  int64_t sequence, first;
  int count;
  bool starts, ends;  // these rows begin, end the loop through the sequence
};

// Adjacent rows of a group, [begin, end), as pieces in the order of the loop.
struct Chunk {
  int64_t begin, end;
  int count;
  Piece pieces[block_rows];
};

// The loop through a group's rows, chunk after chunk.
class GroupWalk {
 public:
  GroupWalk(const int64_t* offsets, const Group& group, bool ascending)
      : offsets_(offsets), left_(group.end - group.begin), ascending_(ascending),
        sequence_(ascending ? group.begin : group.end - 1) {}

  // Advance to the next chunk, of at most `rows` rows; false if there is none.
  bool next(Chunk& chunk, int64_t rows = block_rows) {
    chunk.count = 0;
    for (int64_t room = rows; room > 0 && left_ > 0 && chunk.count < block_rows;) {
      int64_t begin = offsets_[sequence_], end = offsets_[sequence_ + 1], rest = end - begin - taken_;
      if (rest > 0) {
        int count = (int)(rest < room ? rest : room);
        int64_t first = ascending_ ? begin + taken_ : end - 1 - taken_;
        chunk.pieces[chunk.count] = {sequence_, first, count, taken_ == 0, count == rest};
        int64_t low = ascending_ ? first : first - count + 1;
        if (chunk.count == 0 || low < chunk.begin) chunk.begin = low;
        if (chunk.count++ == 0 || low + count > chunk.end) chunk.end = low + count;
        room -= count, taken_ += count;
        if (count < rest) continue;
      }
      left_--, taken_ = 0, sequence_ += ascending_ ? 1 : -1;
    }
    return chunk.count > 0;
  }

 private:
  const int64_t* offsets_;
  int64_t left_;   // sequences
  bool ascending_;
  int64_t sequence_;
  int64_t taken_ = 0;  // rows of the sequence before this chunk
};

// If a group is more than a thread's share of the work, threads divide its units. Two threads of a Zen 5, one sequence
// of 1,000 steps among twenty of 50, or 400 among three of 200: the condition "more than half a share" took 0.96 to
// 1.99 times as long.
inline bool is_lopsided(const ElementwiseCall& call) {
  const raglane_layer& layer = *call.layer;
  if (layer.threads == 1 || (layer.flags & RAGLANE_NO_TEAM)) return false;
  if (layer.flags & RAGLANE_TEAM) return true;
  return call.largest * layer.threads > layer.elements * layer.directions;
}

// A range of units of a group in one direction.
struct Share {
  const Group* group;
  int direction;
  int64_t begin, end;
};

// The work as shares, which threads take one after the other, largest first.
class Shares {
 public:
  // Number of parts into which each group's `units` are divided.
  Shares(const ElementwiseCall& call, int64_t units, int64_t parts)
      : call_(call), units_(units), parts_(parts < units ? parts : units) {}

  bool next(Share& share) {
    int64_t taken = __atomic_fetch_add(&queue_.taken, 1, __ATOMIC_RELAXED);
    int64_t directions = call_.layer->directions, part = taken % parts_, group = taken / parts_ / directions;
    if (group >= call_.groups) return false;
    share = {call_.group + group, (int)(taken / parts_ % directions), units_ * part / parts_,
             units_ * (part + 1) / parts_};
    return true;
  }

 private:
  const ElementwiseCall& call_;
  int64_t units_, parts_;
  Queue queue_;
};

// The position of a vector of units in a prepared row, see products.h.
template <class Cell, class A> RAGLANE_INLINE int64_t prepared_at(int64_t vector) {
  constexpr int width = Lanes<A>::width, per_panel = Cell::unit_vectors;
  return (vector / per_panel * per_panel * Cell::slots + vector % per_panel) * width;
}

template <int N> struct Constant {
  static constexpr int value = N;
};
// Call step(Constant<N>, vector, count) for the vectors [begin, end) of a row of units: `interleaved` at a time,
// then one by one. `count` is a vector's width, or the number of remaining units.
template <class Cell, class A, class Step>
RAGLANE_INLINE void each_vector(int64_t begin, int64_t end, int64_t units, Step&& step) {
  constexpr int width = Lanes<A>::width, together = interleaved<Cell>;
  int64_t vector = begin, whole = units / width < end ? units / width : end;
  for (; vector + together <= whole; vector += together) step(Constant<together>{}, vector, width);
  for (; vector < end; vector++)
    step(Constant<1>{}, vector, (int)(units - vector * width < width ? units - vector * width : width));
}

}  // namespace raglane::RAGLANE_TARGET
