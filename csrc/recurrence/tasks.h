// Shared by the linear recurrences: tasks that threads take one after the other, and rows in scratch.
#pragma once

#include "abi/call.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "simd/activations.h"

namespace raglane::RAGLANE_TARGET {

template <class A> RAGLANE_INLINE int64_t whole_vectors(int64_t count) {
  return (count + Lanes<A>::width - 1) / Lanes<A>::width * Lanes<A>::width;
}

// The numbers of the vector at `first` that are before `end`.
template <class A> RAGLANE_INLINE int lanes_of(int64_t first, int64_t end) {
  return (int)(end - first < Lanes<A>::width ? end - first : Lanes<A>::width);
}
// Call step(i, lanes) for the vectors of a row of `count` numbers.
template <class A, class Step> RAGLANE_INLINE void in_vectors(int64_t count, Step&& step) {
  for (int64_t i = 0; i < count; i += Lanes<A>::width) step(i, lanes_of<A>(i, count));
}

// Bring a number to the caches before its use, long before it not to the nearest; it may be beyond the ends of its array, which
// may be null.
template <class T, bool EARLY = false> RAGLANE_INLINE void fetch(const void* array, int64_t index) {
  __builtin_prefetch((const void*)((uintptr_t)array + (uintptr_t)index * sizeof(T)), 0, EARLY ? 2 : 3);
}

// Copy `count` numbers and zeros up to whole vectors, times a factor.
template <class S, class A> RAGLANE_INLINE void copy_row(A* to, const S* from, int64_t count, A factor = 1) {
  in_vectors<A>(count, [&](int64_t i, int lanes) { store(to + i, load(from + i, lanes) * factor); });
}

// Write `count` numbers, each the sum of `parts` rows that are `stride` numbers apart.
template <class S, class A>
RAGLANE_INLINE void write_sum(S* to, const A* from, int64_t count, int64_t parts = 1, int64_t stride = 0) {
  in_vectors<A>(count, [&](int64_t i, int lanes) {
    Vec<A> sum = load(from + i, lanes);
    for (int64_t part = 1; part < parts; part++) sum = sum + load(from + part * stride + i, lanes);
    store(to + i, sum, lanes);
  });
}

// Run task(number, scratch) for the numbers below `count`, in order, by threads with scratch of their own.
template <class A, class Task>
int32_t run_tasks(int64_t threads, int64_t count, int64_t numbers, bool poison, Task&& task) {
  threads = threads < count ? threads : count;
  if (threads < 1) return RAGLANE_OK;
  const int64_t each = (numbers + 1023) / 1024 * 1024 + 256;  // of one thread no row of a cache is another's
  Scratch<A> memory;
  if (!memory.reserve(threads * each, poison)) return RAGLANE_OUT_OF_MEMORY;
  int64_t taken = 0;
  on_threads((int)threads, [&](int thread, int) {
    for (int64_t number; (number = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < count;)
      task(number, memory.get() + thread * each);
  });
  return RAGLANE_OK;
}

}  // namespace raglane::RAGLANE_TARGET
