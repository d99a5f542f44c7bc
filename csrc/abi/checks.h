// What the calls of layers and of programs check alike, and prepare from their lengths.
#pragma once

#include <algorithm>
#include <vector>

#include "abi/call.h"
#include "abi/failure.h"
#include "runtime/tuning.h"
#include "targets/processor.h"

namespace raglane {

inline constexpr int64_t most_threads = 4096;  // more are a mistake

// The offsets of a call, checked. They are a copy: what another thread writes into the caller's after the check cannot
// lead a kernel out of its memory.
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

// The sequences that are not empty, longest first; of equal ones the earlier first, so that the order is always
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

// What the kernels are told of the sequences that are in `order`.
inline Batch batch_of(const int64_t* offsets, int64_t elements, const std::vector<int64_t>& order) {
  int64_t longest = order.empty() ? 0 : offsets[order[0] + 1] - offsets[order[0]];
  return {offsets, offsets + 1, elements, order.data(), (int64_t)order.size(), longest, cache_bytes()};
}

// A thread is worth its start only for so much work; which thread does the work changes no bit.
inline int64_t useful_threads(int64_t threads, double operations) {
  return std::min(threads, (int64_t)std::min((double)most_threads, 1 + operations / tuning::thread_operations));
}

}  // namespace raglane
