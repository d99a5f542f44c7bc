// Initial and final states in the caller's memory.
#pragma once

#include "gemm/products.h"

namespace raglane::RAGLANE_TARGET {

// The row of one sequence in tensors of states; or in pools, which hold numbers of the type of computation.
template <class S> class StateRow {
  using A = typename Arithmetic<S>::type;

 public:
  StateRow(const raglane_layer& l, int d, int64_t sequence, int64_t size)
      : in_pool_(l.slots), at_((l.slots ? l.slots[sequence] : d * l.sequences + sequence) * size) {}

  template <class To> RAGLANE_INLINE void read(const void* states, To* to, int64_t begin, int64_t end) const {
    if (in_pool_) copy_columns(to, (const A*)states + at_, begin, end);
    else copy_columns(to, (const S*)states + at_, begin, end);
  }
  RAGLANE_INLINE void write(void* states, const A* from, int64_t begin, int64_t end) const {
    if (in_pool_) copy_columns((A*)states + at_, from, begin, end);
    else copy_columns((S*)states + at_, from, begin, end);
  }
  bool in_pool() const { return in_pool_; }
  int64_t at() const { return at_; }

 private:
  const bool in_pool_;
  const int64_t at_;
};

}  // namespace raglane::RAGLANE_TARGET
