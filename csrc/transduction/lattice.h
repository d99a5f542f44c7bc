// The alignments of one sequence of T frames with U labels: the nodes (t, u), before frame t and after u labels, and
// the path from (0, 0) to (T, U). From (t, u) a blank leads to (t + 1, u); a label leads to (t, u + 1), or to
// (t + 1, u + 1) if a frame emits one symbol. A node with t = T has no frame, so only (T, U) continues to the end.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace raglane {

// The sums are computed in double: a path has up to T + U factors.
constexpr double never = -std::numeric_limits<double>::infinity();  // the logarithm of probability 0

// log(exp(a) + exp(b)); NaN if one of them is NaN.
inline double log_sum(double a, double b) {
  if (a < b) {
    double larger = b;
    b = a;
    a = larger;
  }
  // Also without the second term the sum is exact to rounding.
  return b < a - 40 || b == never ? a : a + std::log1p(std::exp(b - a));
}

template <class real> struct Lattice {
  int64_t frames, labels;
  bool one_per_frame;
  const real* emissions;  // (T, U + 1, 2): the log-probabilities of the blank and of the next label

  double blank(int64_t t, int64_t u) const { return emissions[2 * (t * (labels + 1) + u)]; }
  double label(int64_t t, int64_t u) const { return emissions[2 * (t * (labels + 1) + u) + 1]; }

  // Returns the log-probability of all paths. `alpha`, that of all paths to a node, has a row of U + 1 numbers for each
  // frame, `stride` numbers apart; with a stride of 0, each row replaces the one before.
  double forward(double* alpha, int64_t stride) const {
    if (frames == 0) return labels == 0 ? 0 : never;
    double end = never;
    for (int64_t t = 0; t < frames; t++) {
      double* row = alpha + t * stride;
      const double* before = t > 0 ? row - stride : row;
      double from_label = never, diagonal = never;
      for (int64_t u = 0; u <= labels; u++) {
        double stay = t > 0 ? before[u] + blank(t - 1, u) : u == 0 ? 0.0 : never;
        // Read before row[u] replaces it.
        double next_diagonal = t > 0 && u < labels ? before[u] + label(t - 1, u) : never;
        row[u] = log_sum(stay, one_per_frame ? diagonal : from_label);
        from_label = u < labels ? row[u] + label(t, u) : never;
        diagonal = next_diagonal;
      }
      if (t == frames - 1) {
        end = row[labels] + blank(t, labels);
        if (one_per_frame && labels > 0) end = log_sum(end, row[labels - 1] + label(t, labels - 1));
      }
    }
    return end;
  }

  // Replaces the emissions by their probabilities of being on a path, `shares` (T, U + 1, 2), from `alpha` and the
  // log-probability of all paths. `beta`: scratch of U + 1 numbers.
  void backward(const double* alpha, double whole, double* beta, real* shares) const {
    for (int64_t u = 0; u <= labels; u++) beta[u] = u == labels ? 0.0 : never;
    for (int64_t t = frames - 1; t >= 0; t--) {
      double after = never;  // of (t + 1, u + 1)
      for (int64_t u = labels; u >= 0; u--) {
        int64_t node = t * (labels + 1) + u;
        double by_blank = beta[u] + blank(t, u);
        double by_label = u == labels ? never : (one_per_frame ? after : beta[u + 1]) + label(t, u);
        after = beta[u];
        beta[u] = log_sum(by_blank, by_label);
        // A target without paths has no shares.
        shares[2 * node] = whole == never ? real(0) : share(alpha[node] + by_blank - whole);
        shares[2 * node + 1] = whole == never ? real(0) : share(alpha[node] + by_label - whole);
      }
    }
  }

 private:
  static real share(double log_share) { return log_share < -700 ? real(0) : (real)std::exp(log_share); }
};

}  // namespace raglane
