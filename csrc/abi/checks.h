// Checks and preparations that calls of layers and of programs share.
#pragma once

#include <algorithm>
#include <vector>

#include "abi/call.h"
#include "abi/failure.h"
#include "runtime/tuning.h"
#include "targets/processor.h"

namespace raglane {

inline constexpr int64_t most_threads = 4096;  // a larger number is a mistake

// The checked offsets of a call. They are a copy, so that another thread that writes to the caller's after the check
// cannot cause accesses out of bounds.
inline std::vector<int64_t> checked_offsets(const int64_t* given, int64_t sequences, int64_t elements) {
  present("offsets", given);
  std::vector<int64_t> offsets(given, given + sequences + 1);
  if (offsets[0] != 0) fail("offsets[0]: got %lld; the rule: 0", (long long)offsets[0]);
  for (int64_t b = 0; b < sequences; b++)
    if (offsets[b + 1] < offsets[b])
      fail("offsets[%lld]: got %lld after %lld; the rule: offsets never fall", (long long)b + 1,
           (long long)offsets[b + 1], (long long)offsets[b]);
  if (offsets[sequences] != elements)
    fail("offsets[-1]: got %lld; the rule: the number of elements, %lld", (long long)offsets[sequences],
         (long long)elements);
  return offsets;
}

// The non-empty sequences, longest first, ties in order of their index, so that the order is always
// the same.
inline std::vector<int64_t> order_of(const int64_t* offsets, int64_t sequences) {
  std::vector<int64_t> order;
  order.reserve(sequences);
  for (int64_t b = 0; b < sequences; b++)
    if (offsets[b] < offsets[b + 1]) order.push_back(b);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return offsets[a + 1] - offsets[a] > offsets[b + 1] - offsets[b];
  });
  return order;
}

// The description of the sequences in `order` for the kernels.
inline Batch batch_of(const int64_t* offsets, int64_t elements, const std::vector<int64_t>& order) {
  int64_t longest = order.empty() ? 0 : offsets[order[0] + 1] - offsets[order[0]];
  return {offsets, offsets + 1, elements, order.data(), (int64_t)order.size(), longest, cache_bytes()};
}

// Starting a thread pays only for a minimum of work; no bit depends on the number of threads.
inline int64_t useful_threads(int64_t threads, double operations) {
  return std::min(threads, (int64_t)std::min((double)most_threads, 1 + operations / tuning::thread_operations));
}

}  // namespace raglane
