// Random beam searches with n-grams in any pieces, alignments, and recursions over pairs, for the driver.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "tests/drawing.h"

struct DrawnSearch {
  std::mt19937& random;
  raglane_search call{};
  std::vector<int64_t> offsets{0}, lengths, first, shorter, tokens, next;
  std::vector<double> backoff, gram_log_probs;
  Bytes values;
  char message[256] = "";

  explicit DrawnSearch(std::mt19937& drawn) : random(drawn) {
    call.abi = RAGLANE_ABI, call.dtype = below(random, 2), call.threads = 1 + below(random, 4);
    call.sequences = below(random, 6), call.classes = 1 + below(random, 6), call.blank = below(random, (int)call.classes);
    call.beam = 1 + below(random, 7), call.tokens_per_step = 1 + below(random, 6);
    call.least = -below(random, 3) / 4.0, call.weight = below(random, 3) / 2.0, call.bonus = (below(random, 5) - 2) / 3.0;
    for (int64_t b = 0; b < call.sequences; b++) {
      lengths.push_back(below(random, 4) ? below(random, 12) : 0);
      offsets.push_back(offsets.back() + lengths.back());
    }
    call.elements = offsets.back(), values = random_reals(call.dtype, call.elements * call.classes, random);
    if (below(random, 2)) draw_grams();
  }

  // Bigrams: after the empty context all tokens, after another some.
  void draw_grams() {
    call.order = 2, call.contexts = call.classes, call.begin = below(random, (int)call.contexts);
    for (int64_t context = 0; context < call.contexts; context++) {
      first.push_back((int64_t)tokens.size()), shorter.push_back(0), backoff.push_back(-0.5);
      for (int64_t token = 0; token < call.classes; token++)
        if (context == 0 || below(random, 2))
          tokens.push_back(token), next.push_back(token), gram_log_probs.push_back(-1.0 * token);
    }
    first.push_back(call.grams = (int64_t)tokens.size());
    call.first = first.data(), call.shorter = shorter.data(), call.backoff = backoff.data();
    call.tokens = tokens.data(), call.next = next.data(), call.gram_log_probs = gram_log_probs.data();
  }

  void require(bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "%s: %s\n", what, message), std::exit(1);
  }

  // Run the steps [begin, end) of each sequence after a state, and replace the state.
  int32_t run(int64_t begin, int64_t end, std::vector<int64_t>& state, std::vector<int64_t>& bounds) {
    raglane_search part = call;
    std::vector<int64_t> places{0};
    Bytes rows;
    const int64_t row = call.classes * bytes_of(call.dtype);
    for (int64_t b = 0; b < call.sequences; b++) {
      const int64_t from = std::min(begin, lengths[b]), to = std::min(end, lengths[b]);
      rows.insert(rows.end(), values.begin() + (offsets[b] + from) * row, values.begin() + (offsets[b] + to) * row);
      places.push_back(places.back() + to - from);
    }
    rows.shrink_to_fit();
    part.offsets = places.data(), part.elements = places.back(), part.log_probs = rows.data();
    if (!bounds.empty()) part.state = state.data(), part.state_offsets = bounds.data(), part.state_size = (int64_t)state.size();
    void* found = nullptr;
    int64_t size = 0;
    const int32_t status = raglane_find_prefixes(&part, &found, &size, message, sizeof message);
    if (status != RAGLANE_OK) return status;
    state = std::vector<int64_t>(size), bounds = std::vector<int64_t>(call.sequences + 1);
    return raglane_take_prefixes(found, bounds.data(), state.data(), message, sizeof message);
  }

  void check() {
    std::vector<int64_t> whole, bounds, pieces, other;
    require(run(0, 100, whole, bounds) == RAGLANE_OK, "a search failed");
    call.threads = 1 + below(random, 4);
    const int64_t cut = below(random, 12);
    require(run(0, cut, pieces, other) == RAGLANE_OK, "a search failed");
    std::vector<int64_t> wrong = pieces, its_bounds = other;
    require(run(cut, 100, pieces, other) == RAGLANE_OK && pieces == whole, "a search has other bits in pieces");
    if (wrong.empty()) return;
    const int64_t numbers[] = {-1, 0, 1, 5, int64_t(1) << 40, int64_t(1) << 62, 0x7ff8000000000000};
    wrong[random() % wrong.size()] = numbers[below(random, 7)];
    run(cut, 100, wrong, its_bounds);  // any result, but no access out of bounds
  }
};

// The alignment of random labels, with some that do not fit.
inline void check_alignment(DrawnSearch& drawn) {
  std::mt19937& random = drawn.random;
  raglane_alignment a{};
  a.abi = RAGLANE_ABI, a.dtype = drawn.call.dtype, a.threads = 1 + below(random, 4), a.sequences = drawn.call.sequences;
  a.elements = drawn.call.elements, a.classes = drawn.call.classes, a.blank = drawn.call.blank;
  std::vector<int64_t> bounds{0}, targets;
  for (int64_t b = 0; b < a.sequences; b++) bounds.push_back(bounds.back() + below(random, 5));
  a.labels = bounds.back();
  for (int64_t k = 0; k < a.labels; k++) targets.push_back(below(random, (int)a.classes));
  std::vector<int64_t> times(2 * a.labels);
  std::vector<double> confidences(a.labels), scores(a.sequences);
  a.offsets = drawn.offsets.data(), a.label_offsets = bounds.data(), a.log_probs = drawn.values.data();
  a.targets = targets.data(), a.times = times.data(), a.confidences = confidences.data(), a.scores = scores.data();
  drawn.require(raglane_best_alignment(&a, drawn.message, sizeof drawn.message) == RAGLANE_OK, "an alignment failed");
  for (int64_t b = 0; b < a.sequences; b++)
    for (int64_t k = bounds[b]; k < bounds[b + 1]; k++)
      drawn.require(times[2 * k] <= times[2 * k + 1] && times[2 * k + 1] <= drawn.lengths[b], "times out of range");
}

inline void check_pairs(DrawnSearch& drawn) {
  std::mt19937& random = drawn.random;
  raglane_pairs p{};
  p.abi = RAGLANE_ABI, p.threads = 1 + below(random, 4), p.sequences = drawn.call.sequences, p.gamma = 0.5;
  std::vector<int64_t> right{0}, tokens[2];
  for (int64_t b = 0; b < p.sequences; b++) {
    right.push_back(right.back() + below(random, 6));
    p.pairs += drawn.lengths[b] * (right[b + 1] - right[b]);
  }
  p.left_elements = drawn.call.elements, p.right_elements = right.back();
  for (int64_t i = 0; i < p.left_elements + p.right_elements; i++) tokens[i >= p.left_elements].push_back(below(random, 3));
  const Bytes costs = random_reals(RAGLANE_FLOAT64, p.pairs, random);
  std::vector<double> reach(p.pairs), shares(p.pairs);
  std::vector<int64_t> counts(3 * p.sequences, -1);
  p.left_offsets = drawn.offsets.data(), p.right_offsets = right.data(), p.costs = (const double*)costs.data();
  p.reach = reach.data(), p.shares = shares.data(), p.left = tokens[0].data(), p.right = tokens[1].data();
  p.counts = counts.data();
  for (auto function : {raglane_soft_dtw, raglane_soft_dtw_shares, raglane_edits})
    drawn.require(function(&p, drawn.message, sizeof drawn.message) == RAGLANE_OK, "a recursion over pairs failed");
  for (double share : shares) drawn.require(share >= 0 && share < 1 + 1e-9, "a share is not a probability");
  for (int64_t b = 0; b < p.sequences; b++)
    drawn.require(counts[3 * b] - counts[3 * b + 1] == drawn.lengths[b] - (right[b + 1] - right[b]), "edits do not add up");
}
