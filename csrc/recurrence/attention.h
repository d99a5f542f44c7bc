// Linear attention; raglane.h has its equations. What both directions share: the factors of a head's steps.
#pragma once

#include "recurrence/tasks.h"

namespace raglane::RAGLANE_TARGET {

// The largest number whose exponential is finite, with room for a sum.
template <class A> inline constexpr A highest_exponent = sizeof(A) == 4 ? (A)87.72283 : (A)708.782712893384;

// Of the numbers of whole vectors.
template <class A> RAGLANE_INLINE void exponentials(A* values, int64_t count) {
  in_vectors<A>(count, [&](int64_t i, int) {
    Vec<A> x = load(values + i);
    exp<A, 1>(&x);
    store(values + i, x);
  });
}

template <class S> class AttentionCall {
 public:
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  static constexpr int width = Lanes<A>::width;

  explicit AttentionCall(const LinearAttention& call) : c_(*call.attention), order_(call.order), ordered_(call.ordered) {}

 protected:
  const raglane_attention& c_;
  const int64_t* order_;  // the sequences, longest first
  const int64_t ordered_;

  bool poison() const { return c_.flags & RAGLANE_POISON; }
  int64_t state_size() const { return c_.key_size * c_.value_size; }
  A* border_at(int64_t b, int64_t first, int64_t head) const {
    const int64_t row = c_.offsets[b] / border + (first - c_.offsets[b]) / border - 1;
    return (A*)c_.borders + row * c_.heads * (state_size() + (c_.log_gain ? c_.key_size : 0)) + head * state_size();
  }
  // After the states of all heads.
  A* normaliser_border_at(int64_t b, int64_t first, int64_t head) const {
    return border_at(b, first, c_.heads) + head * c_.key_size;
  }
  // A number, or 0 if there are none.
  static A number(const void* array, int64_t at) { return array ? ((const A*)array)[at] : 0; }
  bool resets(int64_t row) const { return c_.resets && c_.resets[row]; }

  // Of the elements [first, first + count) of a head: decay and gain, and the lowest divisor with log_gain.
  struct Factors {
    A decay[border], gain[border], floor[border];
  };

  // Rows of q or k of some elements, in whole vectors, to rows `stride` numbers apart.
  void read_keys(A* to, const void* from, int64_t first, int count, int64_t key_head, int64_t stride) const {
    for (int t = 0; t < count; t++)
      copy_row(to + t * stride, (const S*)from + ((first + t) * c_.key_heads + key_head) * c_.key_size, c_.key_size);
  }
  // The decays of each key of an element, in whole vectors.
  void read_decays(A* to, int64_t row, int64_t head) const {
    copy_row(to, (const A*)c_.log_decay + (row * c_.heads + head) * c_.key_size, c_.key_size);
    exponentials(to, c_.key_size);
  }

  // The stabiliser before and after an element.
  struct Levels {
    A before, after;
  };
  Levels levels_of(int64_t row, int64_t head, A previous) const {
    const int64_t at = row * c_.heads + head;
    const A before = number(c_.log_decay, at) + (resets(row) ? 0 : previous);
    const A gain = ((const A*)c_.log_gain)[at];
    return {before, before > gain || before != before ? before : gain};  // NaN if either is
  }

  // `level`: the stabiliser before the first element, and then that after the last; not read without log_gain.
  void find_factors(Factors& factors, int64_t first, int count, int64_t head, A& level, bool saves = false) const {
    for (int t = 0; t < border; t++) {
      factors.decay[t] = factors.floor[t] = factors.gain[t] = 0;
      if (t >= count) continue;
      const int64_t at = (first + t) * c_.heads + head;
      if (!c_.log_gain) {
        if (c_.log_decay && !c_.per_key) factors.decay[t] = ((const A*)c_.log_decay)[at];
        factors.gain[t] = c_.gain ? ((const A*)c_.gain)[at] : 1;
        continue;
      }
      const Levels levels = levels_of(first + t, head, level);
      level = levels.after;
      if (saves && c_.levels) ((A*)c_.levels)[at] = level;
      const A finite = level == -__builtin_inf() ? 0 : level;
      factors.decay[t] = levels.before - finite;
      factors.gain[t] = ((const A*)c_.log_gain)[at] - finite;
      factors.floor[t] = log_floor(level);
    }
    exponentials(factors.decay, border);
    if (!c_.log_gain) return;
    exponentials(factors.gain, border);
    exponentials(factors.floor, border);
  }

  // The divisor of an output, which is at least the exponential of log_floor.
  static A log_floor(A level) { return -level > highest_exponent<A> ? highest_exponent<A> : -level; }
  A divisor(A read, A floor) const {
    const A size = read < 0 ? -read : read;
    return (size > floor || size != size ? size : floor) + (A)c_.eps;
  }
};

}  // namespace raglane::RAGLANE_TARGET
