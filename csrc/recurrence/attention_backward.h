// Linear attention, backward: what is the same by steps and by products of matrices. A task is a sequence, a head of k, and
// a set of the columns of the states of its heads of v. It runs from border to border, backwards.
#pragma once

#include "recurrence/attention.h"

namespace raglane::RAGLANE_TARGET {

template <class S> class AttentionBackward : AttentionCall<S> {
  using Base = AttentionCall<S>;
  using typename Base::A, typename Base::V, typename Base::Factors;
  using Base::c_, Base::width;

 public:
  explicit AttentionBackward(const LinearAttention& call) : Base(call), padded_((whole_vectors<A>(c_.key_size) + 3) / 4 * 4) {
    const int64_t heads = per_key_head(), wanted = (least_sets + c_.key_heads - 1) / c_.key_heads;
    parts_ = heads < wanted ? heads : wanted;
    blocks_ = (c_.value_size + columns - 1) / columns;
    splits_ = (wanted + parts_ - 1) / parts_;
    if (splits_ > blocks_) splits_ = blocks_;
  }

  int32_t run() {
    const int64_t rows = c_.elements * c_.key_heads * c_.key_size, sets = parts_ * splits_;
    const int64_t heads = c_.elements * c_.heads, decays = heads * (c_.per_key ? c_.key_size : 1);
    Scratch<A> of_q, of_k, of_decay, of_gain;
    const bool copies = sets > 1;
    if (!of_q.reserve(copies ? rows * sets : 0, Base::poison()) || !of_k.reserve(copies ? rows * sets : 0, Base::poison()) ||
        !of_decay.reserve(decays * splits_, Base::poison()) || !of_gain.reserve(heads * splits_, Base::poison()))
      return RAGLANE_OUT_OF_MEMORY;
    q_parts_ = of_q.get(), k_parts_ = of_k.get(), decay_parts_ = of_decay.get(), gain_parts_ = of_gain.get();
    const int32_t status = c_.delta || (c_.per_key && c_.log_decay) ? run_all<Steps>() : run_all<Products>();
    if (status != RAGLANE_OK) return status;
    on_threads((int)c_.threads, [&](int thread, int threads) {
      if (copies) {
        const int64_t size = c_.key_heads * c_.key_size, first = c_.elements * thread / threads * size;
        const int64_t count = c_.elements * (thread + 1) / threads * size - first;
        if (c_.grad_q) write_sum((S*)c_.grad_q + first, q_parts_ + first, count, sets, rows);
        if (c_.grad_k) write_sum((S*)c_.grad_k + first, k_parts_ + first, count, sets, rows);
      }
      const int64_t first = c_.elements * thread / threads, end = c_.elements * (thread + 1) / threads;
      const int64_t each = decays / (c_.elements ? c_.elements : 1);
      A* of_gains = (A*)(c_.log_gain ? c_.grad_log_gain : c_.grad_gain);
      if (c_.grad_log_decay)
        write_sum((A*)c_.grad_log_decay + first * each, decay_parts_ + first * each, (end - first) * each, splits_, decays);
      if (of_gains)
        write_sum(of_gains + first * c_.heads, gain_parts_ + first * c_.heads, (end - first) * c_.heads, splits_, heads);
    });
    if (c_.log_gain) {
      const int64_t count = Base::ordered_ * c_.heads;
      on_threads((int)c_.threads, [&](int thread, int threads) {
        for (int64_t at = count * thread / threads; at < count * (thread + 1) / threads; at++)
          add_levels(Base::order_[at / c_.heads], at % c_.heads);
      });
    }
    return RAGLANE_OK;
  }

 private:
  static constexpr int columns = 16;  // of a block
  static constexpr int least_sets = 8;

  const int64_t padded_;             // keys of whole vectors, and of whole rows of a tile
  int64_t parts_, splits_, blocks_;  // of the heads of a head of k; of the blocks of a head; blocks of a head's state
  A *q_parts_ = nullptr, *k_parts_ = nullptr, *decay_parts_ = nullptr, *gain_parts_ = nullptr;

  int64_t per_key_head() const { return c_.heads / c_.key_heads; }
  int64_t most_heads() const { return (per_key_head() + parts_ - 1) / parts_; }
  int64_t most_blocks() const { return (blocks_ + splits_ - 1) / splits_; }

  class Task;      // what both have
  class Steps;     // attention_steps.h
  class Products;  // attention_products.h
  template <class Kind> int32_t run_all() {
    return run_tasks<A>(c_.threads, Base::ordered_ * c_.key_heads * parts_ * splits_, Kind::numbers(*this), Base::poison(),
                        [&](int64_t number, A* scratch) { Kind(*this, number, scratch).run(); });
  }

  // The gradients of the stabiliser of a head, which without eps would be zeros: a factor of the states and of the
  // divisor would cancel. They go to the larger one of the two numbers of which it is the maximum.
  void add_levels(int64_t b, int64_t head) const {
    const int64_t begin = c_.offsets[b], end = c_.offsets[b + 1], state = b * c_.heads + head;
    A grad = final_level(state);
    for (int64_t row = end - 1; row >= begin; row--) {
      const int64_t at = row * c_.heads + head;
      const A previous = row > begin ? ((const A*)c_.levels)[at - c_.heads] : initial_level(state);
      const auto levels = Base::levels_of(row, head, previous);
      const A level = levels.after, floor = floor_of(level), divisor = Base::divisor(((const A*)c_.reads)[at], floor);
      grad -= product_of_outputs(at) * ((A)c_.eps / divisor);
      const bool stays = levels.before == level;
      if (stays && c_.grad_log_decay) ((A*)c_.grad_log_decay)[at] += grad;
      if (!stays && c_.grad_log_gain) ((A*)c_.grad_log_gain)[at] += grad;
      if (!stays || Base::resets(row)) grad = 0;
      if (row > begin || !c_.grad_initial_stabiliser) continue;
      // The initial states are not multiplied by a factor of it.
      const bool starts = !Base::resets(row);
      ((A*)c_.grad_initial_stabiliser)[state] = starts ? grad + first_decay(at) : 0;
    }
  }
  A initial_level(int64_t state) const {
    return c_.initial_stabiliser ? ((const A*)c_.initial_stabiliser)[state] : 0;
  }
  A floor_of(A level) const {
    A floor[width] = {};
    floor[0] = -level > highest_exponent<A> ? highest_exponent<A> : -level;
    exponentials(floor, width);
    return floor[0];
  }
  // The gradient of the first log_decay before that of the stabiliser was added.
  A first_decay(int64_t at) const {
    A sum = 0;
    for (int64_t split = 0; split < splits_; split++) sum += decay_parts_[split * c_.elements * c_.heads + at];
    return sum;
  }
  A final_level(int64_t state) const {
    A grad = c_.grad_final_stabiliser ? ((const A*)c_.grad_final_stabiliser)[state] : 0;
    if (c_.grad_final) grad -= dot((const A*)c_.grad_final, (const A*)c_.final, state * Base::state_size(), Base::state_size());
    if (c_.grad_final_normaliser)
      grad -= dot((const A*)c_.grad_final_normaliser, (const A*)c_.final_normaliser, state * c_.key_size, c_.key_size);
    return grad;
  }
  template <class T> static A dot(const T* a, const T* b, int64_t first, int64_t count) {
    V sum{};
    for (int64_t i = 0; i < count; i += width) {
      const int here = (int)(count - i < width ? count - i : width);
      sum = fma(load(a + first + i, here), load(b + first + i, here), sum);
    }
    return sum_of(sum);
  }
  // The output of a head times its gradient.
  A product_of_outputs(int64_t at) const {
    if (!c_.grad_output) return 0;
    return dot((const S*)c_.grad_output, (const S*)c_.output, at * c_.value_size, c_.value_size);
  }

};

template <class S> class AttentionBackward<S>::Task {
 protected:
  Task(const AttentionBackward& loops, int64_t number, A* scratch) : l_(loops), c_(loops.c_), next_(scratch) {
    const int64_t sets = l_.parts_ * l_.splits_, part = number % sets / l_.splits_, heads = l_.per_key_head();
    set_ = number % sets, split_ = number % l_.splits_;
    key_head_ = number / sets % c_.key_heads, b_ = l_.order_[number / sets / c_.key_heads];
    first_head_ = key_head_ * heads + heads * part / l_.parts_, end_head_ = key_head_ * heads + heads * (part + 1) / l_.parts_;
    first_block_ = l_.blocks_ * split_ / l_.splits_, end_block_ = l_.blocks_ * (split_ + 1) / l_.splits_;
    begin_ = c_.offsets[b_], length_ = c_.offsets[b_ + 1] - begin_;
  }

  const AttentionBackward& l_;
  const raglane_attention& c_;
  A* next_;
  int64_t set_, split_, key_head_, b_, first_head_, end_head_, first_block_, end_block_, begin_, length_;
  int64_t first_ = 0;  // element of the current steps
  int count_ = 0;
  Factors factors_;

  A* take(int64_t count) {
    A* begin = next_;
    next_ += whole_vectors<A>(count);
    return begin;
  }
  void read_rows(A* to, const void* from) const {
    for (int t = 0; t < count_; t++)
      copy_row(to + t * l_.padded_, (const S*)from + ((first_ + t) * c_.key_heads + key_head_) * c_.key_size, c_.key_size);
  }
  void write_rows(const A* from, A* parts, S* to) const {
    if (!to) return;
    const bool copies = l_.parts_ * l_.splits_ > 1;
    for (int t = 0; t < count_; t++) {
      const int64_t at = ((first_ + t) * c_.key_heads + key_head_) * c_.key_size;
      if (copies) write_sum(parts + set_ * c_.elements * c_.key_heads * c_.key_size + at, from + t * l_.padded_, c_.key_size);
      else write_sum(to + at, from + t * l_.padded_, c_.key_size);
    }
  }
  // A row of a head in sums of this split.
  int64_t part_of(int t, int64_t head) const { return (split_ * c_.elements + first_ + t) * c_.heads + head; }
};

}  // namespace raglane::RAGLANE_TARGET
