// Recursions over all pairs of steps of two sequences: soft-DTW (Cuturi and Blondel 2017) and the edit distance.
#pragma once

#include "transduction/sequences.h"

namespace raglane {

// The soft minimum over all paths to each pair: cost + softmin(above, left, diagonal).
inline void soft_dtw(const double* costs, double* reach, int64_t rows, int64_t columns, double gamma) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) {
      const int64_t at = i * columns + j;
      double before = 0;
      if (at > 0) {
        const double above = i > 0 ? reach[at - columns] : infinity, left = j > 0 ? reach[at - 1] : infinity;
        const double diagonal = i > 0 && j > 0 ? reach[at - columns - 1] : infinity;
        before = std::min(std::min(above, left), diagonal);
        if (before < infinity)
          before -= gamma * std::log(std::exp((before - above) / gamma) + std::exp((before - left) / gamma) +
                                     std::exp((before - diagonal) / gamma));
        else before = above + left + diagonal;  // infinite, or NaN
      }
      reach[at] = costs[at] + before;
    }
}

// The derivative of the last soft minimum with respect to each cost: the probability that a path passes the pair.
inline void soft_dtw_shares(const double* costs, const double* reach, double* shares, int64_t rows, int64_t columns,
                            double gamma) {
  const int64_t last = rows * columns - 1;
  const bool is_possible = last >= 0 && reach[last] != infinity;
  for (int64_t i = rows - 1; i >= 0; i--)
    for (int64_t j = columns - 1; j >= 0; j--) {
      const int64_t at = i * columns + j;
      double share = at == last && is_possible;
      auto add = [&](bool exists, int64_t next) {
        if (exists && shares[next] != 0) share += shares[next] * std::exp((reach[next] - costs[next] - reach[at]) / gamma);
      };
      add(i + 1 < rows, at + columns), add(j + 1 < columns, at + 1), add(i + 1 < rows && j + 1 < columns, at + columns + 1);
      shares[at] = share;
    }
}

// Count the insertions, deletions and substitutions of a cheapest path. Among equal ones, the last operation is a
// substitution or equality if possible, else a deletion.
inline void count_edits(const int64_t* left, int64_t rows, const int64_t* right, int64_t columns, int64_t* counts) {
  struct Edits {
    int64_t insertions, deletions, substitutions;
    int64_t total() const { return insertions + deletions + substitutions; }
  };
  std::vector<Edits> line(columns + 1);
  for (int64_t j = 0; j <= columns; j++) line[j] = {0, j, 0};
  for (int64_t i = 0; i < rows; i++) {
    Edits diagonal = line[0];
    line[0].insertions++;
    for (int64_t j = 0; j < columns; j++) {
      Edits found = diagonal, deleted = line[j], inserted = diagonal = line[j + 1];
      found.substitutions += left[i] != right[j], deleted.deletions++, inserted.insertions++;
      if (deleted.total() < found.total()) found = deleted;
      if (inserted.total() < found.total()) found = inserted;
      line[j + 1] = found;
    }
  }
  counts[0] = line[columns].insertions, counts[1] = line[columns].deletions, counts[2] = line[columns].substitutions;
}

}  // namespace raglane
