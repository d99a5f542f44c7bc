// Divides a backward pass that recomputes the gates into rounds. This depends only on the lengths and the number of
// steps: sums over the elements are computed round after round, and their bits must not depend on the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "abi/call.h"

namespace raglane {

// There are as many rounds as the longest sequence needs. Each takes the sequences with the most remaining steps, just
// enough that all sequences end with the longest one: so every round has about the same work, for any lengths.
class RoundPlan {
 public:
  // `order`: the sequences that are not empty, longest first; at least one.
  RoundPlan(const int64_t* offsets, int64_t sequences, const std::vector<int64_t>& order, int64_t steps) {
    std::vector<int64_t> left(sequences), alive = order;
    int64_t pieces = 0;
    for (int64_t b : order) {
      left[b] = offsets[b + 1] - offsets[b];
      pieces += 1 + (left[b] - 1) / steps;
    }
    const int64_t least = 1 + (left[order[0]] - 1) / steps, most = 1 + (pieces - 1) / least;
    auto more = [&](int64_t a, int64_t b) { return left[a] > left[b]; };
    first_.push_back(0), sequence_.reserve(pieces);
    while (!alive.empty()) {
      const auto end = alive.begin() + std::min(most, (int64_t)alive.size());
      int64_t elements = 0;
      for (auto b = alive.begin(); b != end; b++) {
        int64_t size = std::min(steps, left[*b]);
        sequence_.push_back(*b), elements += size, left[*b] -= size;
      }
      plan.most_sequences = std::max(plan.most_sequences, (int64_t)(end - alive.begin()));
      plan.most_elements = std::max(plan.most_elements, elements);
      first_.push_back((int64_t)sequence_.size());
      std::inplace_merge(alive.begin(), end, alive.end(), more);
      while (!alive.empty() && left[alive.back()] == 0) alive.pop_back();
    }
    plan.steps = steps, plan.count = (int64_t)first_.size() - 1;
    plan.first = first_.data(), plan.sequence = sequence_.data();
  }
  RoundPlan(const RoundPlan&) = delete;

  Rounds plan = {};

 private:
  std::vector<int64_t> first_, sequence_;
};

}  // namespace raglane
