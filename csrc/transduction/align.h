// The best alignment of labels by CTC, by Viterbi's algorithm, for one sequence.
//
// The states are a blank, then each label followed by a blank. Among equal alignments the best stays in its state longest.
#pragma once

#include "transduction/sequences.h"

namespace raglane {

template <class T>
void align(const raglane_alignment& call, int64_t sequence, const T* log_probs, int64_t steps, const int64_t* targets,
           int64_t count, int64_t* times, double* confidences) {
  const int64_t states = 2 * count + 1;
  for (int64_t k = 0; k < count; k++) {
    if (targets[k] < 0 || targets[k] >= call.classes) fail("targets must be classes, got %lld", (long long)targets[k]);
    times[2 * k] = times[2 * k + 1] = 0, confidences[k] = 0;
  }
  call.scores[sequence] = steps > 0 || count > 0 ? -infinity : 0;
  if (steps < count || steps == 0) return;
  // Two more states in front, which are never reached.
  std::vector<double> before(states + 2, -infinity), after(states + 2, -infinity), bars(states, -infinity), emissions(states);
  std::vector<int64_t> labels(states, call.blank);
  for (int64_t k = 0; k < count; k++) {
    labels[2 * k + 1] = std::clamp<int64_t>(targets[k], 0, call.classes - 1);  // a copy, which another thread cannot change
    if (k == 0 || labels[2 * k + 1] != labels[2 * k - 1]) bars[2 * k + 1] = 0;
  }
  std::vector<uint8_t> moves(steps * states);
  before[1] = 0;  // in front of the first step, so that a path may begin in state 0 or 1
  for (int64_t t = 0; t < steps; t++) {
    const int64_t low = std::max<int64_t>(0, states - 2 * (steps - t)), high = std::min(states, 2 * t + 2);
    const T* row = log_probs + t * call.classes;
    bool is_number = true;
    for (int64_t s = low; s < high; s++) emissions[s] = row[labels[s]], is_number &= emissions[s] < infinity;
    if (!is_number) {
      call.scores[sequence] = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    for (int64_t s = low; s < high; s++) {
      const double stay = before[s + 2], step = before[s + 1], skip = before[s] + bars[s];
      const double entered = std::max(step, skip);
      moves[t * states + s] = entered > stay ? (skip > step ? 2 : 1) : 0;
      after[s + 2] = std::max(stay, entered) + emissions[s];
    }
    before.swap(after), after[1] = -infinity;
  }
  int64_t state = count > 0 && before[states] > before[states + 1] ? states - 2 : states - 1;
  call.scores[sequence] = before[state + 2];
  if (before[state + 2] == -infinity) return;
  for (int64_t t = steps - 1; t >= 0; t--) {
    if (state % 2) {
      int64_t* span = times + state - 1;
      if (span[1] == 0) span[1] = t + 1;
      span[0] = t;
      confidences[state / 2] += std::exp((double)log_probs[t * call.classes + labels[state]]);
    }
    state -= moves[t * states + state];
  }
  for (int64_t k = 0; k < count; k++) confidences[k] /= (double)(times[2 * k + 1] - times[2 * k]);
}

}  // namespace raglane
