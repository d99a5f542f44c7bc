// Checks and preparations that calls of layers and of programs share.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "abi/call.h"
#include "abi/failure.h"
#include "runtime/threads.h"
#include "runtime/tuning.h"
#include "targets/processor.h"

namespace raglane {

// The checked offsets of a call. They are a copy, so that another thread that writes to the caller's after the check
// cannot cause accesses out of bounds.
inline std::vector<int64_t> checked_offsets(const int64_t* given, int64_t sequences, int64_t elements) {
  present("offsets", given);
  std::vector<int64_t> offsets(given, given + sequences + 1);
  if (offsets[0] != 0) fail("offsets[0] must be 0, got %lld", (long long)offsets[0]);
  for (int64_t b = 0; b < sequences; b++)
    if (offsets[b + 1] < offsets[b])
      fail("offsets[%lld] must be at least the one before, got %lld after %lld", (long long)b + 1,
          (long long)offsets[b + 1], (long long)offsets[b]);
  if (offsets[sequences] != elements)
    fail("offsets[-1] must be the number of elements, %lld, got %lld", (long long)elements,
        (long long)offsets[sequences]);
  return offsets;
}

inline void check_aligned(const char* name, const void* pointer) {
  if ((uintptr_t)pointer % 64 != 0) fail("%s must be 64-byte aligned, got another address", name);
}

// Checks the header of packed weights, if there are any.
inline void check_packed(const void* packed, const PackedHeader& wanted) {
  if (!packed) return;
  check_aligned("packed", packed);
  if (std::memcmp(packed, &wanted, sizeof wanted) != 0)
    fail("packed must be the weights of this layer and instruction set, got others");
}

// Packs weights: pack({to, bytes}) counts the bytes, and packs after the header if `to` is not null.
template <class Pack> int32_t pack_after_header(const PackedHeader& header, void* to, int64_t* bytes, Pack&& pack) {
  check_aligned("to", to);
  int64_t needed = 0;
  int32_t status = pack(PackTo{nullptr, &needed});
  if (!to || status != RAGLANE_OK) return *bytes = needed, status;
  if (*bytes != needed) fail("bytes must be %lld, got %lld", (long long)needed, (long long)*bytes);
  std::memcpy(to, &header, sizeof header);
  return pack(PackTo{to, &needed});
}

// The checked slots of a call, a copy as well. A slot that occurs twice would be written by two threads.
inline std::vector<int64_t> checked_slots(const int64_t* given, int64_t sequences, int64_t count) {
  std::vector<int64_t> slots(given, given + (given ? sequences : 0));
  bool rises = true;
  for (size_t b = 0; b < slots.size(); b++) {
    if (slots[b] < 0 || slots[b] >= count)
      fail("slots[%lld] must be from 0 to %lld, got %lld", (long long)b, (long long)count - 1, (long long)slots[b]);
    rises &= b == 0 || slots[b - 1] < slots[b];
  }
  if (rises) return slots;
  std::vector<int64_t> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail("slots must be different for each sequence, got %lld twice", (long long)*twice);
  return slots;
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

// Adjacent sequences in groups of nearly equal numbers of elements, largest first. A sequence is never divided.
inline std::vector<Group> groups_of(const int64_t* offsets, int64_t sequences, int64_t elements) {
  std::vector<Group> groups;
  int64_t least = std::max(tuning::group_elements, (elements + tuning::most_groups - 1) / tuning::most_groups);
  for (int64_t b = 0, begin = 0; b < sequences; b++) {
    if (b + 1 < sequences && offsets[b + 1] - offsets[begin] < least) continue;
    groups.push_back({begin, b + 1, (int64_t)groups.size()});
    begin = b + 1;
  }
  std::stable_sort(groups.begin(), groups.end(), [&](const Group& a, const Group& b) {
    return offsets[a.end] - offsets[a.begin] > offsets[b.end] - offsets[b.begin];
  });
  return groups;
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

// The same for products of every element with weights, for which the time to read them may count instead.
inline int64_t useful_threads(int64_t threads, double operations_of_row, const int64_t* offsets, int64_t sequences) {
  int64_t longest = 0;
  for (int64_t b = 0; b < sequences; b++) longest = std::max(longest, offsets[b + 1] - offsets[b]);
  const double bytes = operations_of_row / 2 * sizeof(float);
  const bool reads = bytes > (double)(cache_bytes() / tuning::weights_of_cache);
  const double rows = std::max((double)offsets[sequences], reads ? tuning::least_rows * (double)longest : 0);
  return useful_threads(threads, operations_of_row * rows);
}

}  // namespace raglane
