// Linear attention, backward: step by step, and what products of matrices share. A task is a sequence, a head of k, and
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
    const int64_t sets = parts_ * splits_, of_keys = c_.key_heads * c_.key_size;
    const int64_t of_decays = c_.heads * (c_.per_key ? c_.key_size : 1);
    Scratch<A> of_q, of_k, of_decay, of_gain;
    const auto reserve = [&](Scratch<A>& parts, int64_t each) { return parts.reserve(c_.elements * each, Base::poison()); };
    if (!reserve(of_q, copies() ? of_keys * sets : 0) || !reserve(of_k, copies() ? of_keys * sets : 0) ||
        !reserve(of_decay, of_decays * splits_) || !reserve(of_gain, c_.heads * splits_))
      return RAGLANE_OUT_OF_MEMORY;
    q_parts_ = of_q.get(), k_parts_ = of_k.get(), decay_parts_ = of_decay.get(), gain_parts_ = of_gain.get();
    const int32_t status = c_.per_key && c_.log_decay ? run_all<Steps>() : run_all<Products>();
    if (status != RAGLANE_OK) return status;
    on_threads((int)c_.threads, [&](int thread, int threads) {
      const int64_t first = c_.elements * thread / threads, end = c_.elements * (thread + 1) / threads;
      const auto add = [&](auto* to, const A* parts, int64_t each, int64_t count) {
        if (to) write_sum(to + first * each, parts + first * each, (end - first) * each, count, c_.elements * each);
      };
      if (copies()) add((S*)c_.grad_q, q_parts_, of_keys, sets);
      if (copies()) add((S*)c_.grad_k, k_parts_, of_keys, sets);
      add((A*)c_.grad_log_decay, decay_parts_, of_decays, splits_);
      add((A*)(c_.log_gain ? c_.grad_log_gain : c_.grad_gain), gain_parts_, c_.heads, splits_);
    });
    if (c_.grad_initial_stabiliser) write_initial_levels();
    return RAGLANE_OK;
  }

 private:
  static constexpr int columns = 16;  // of a block
  static constexpr int least_sets = 4;

  const int64_t padded_;             // keys of whole vectors, and of whole rows of a tile
  int64_t parts_, splits_, blocks_;  // of the heads of a head of k; of the blocks of a head; blocks of a head's state
  A *q_parts_ = nullptr, *k_parts_ = nullptr, *decay_parts_ = nullptr, *gain_parts_ = nullptr;

  bool copies() const { return parts_ * splits_ > 1; }
  int64_t per_key_head() const { return c_.heads / c_.key_heads; }
  int64_t most_heads() const { return (per_key_head() + parts_ - 1) / parts_; }
  int64_t most_blocks() const { return (blocks_ + splits_ - 1) / splits_; }

  class Task;      // what both have
  class Steps;     // step by step
  class Products;  // attention_products.h
  template <class Kind> int32_t run_all() {
    return run_tasks<A>(c_.threads, Base::ordered_ * c_.key_heads * parts_ * splits_, Kind::numbers(*this), Base::poison(),
                        [&](int64_t number, A* scratch) { Kind(*this, number, scratch).run(); });
  }

  // The first stabiliser is added to the first log_decay. The initial states are not multiplied by a factor of it.
  void write_initial_levels() const {
    for (int64_t i = 0; i < Base::ordered_ * c_.heads; i++) {
      const int64_t b = Base::order_[i / c_.heads], head = i % c_.heads, begin = c_.offsets[b], state = b * c_.heads + head;
      A grad = 0;
      if (begin == c_.offsets[b + 1]) grad = Base::number(c_.grad_final_stabiliser, state);
      else if (!Base::resets(begin)) write_sum(&grad, decay_parts_ + begin * c_.heads + head, 1, splits_, c_.elements * c_.heads);
      ((A*)c_.grad_initial_stabiliser)[state] = grad;
    }
  }
  // The gradient of a stabiliser after the last step.
  A of_last_level(int64_t state) const {
    A grad = Base::number(c_.grad_final_stabiliser, state);
    if (c_.grad_final) grad -= dot((const A*)c_.grad_final, (const A*)c_.final, state * Base::state_size(), Base::state_size());
    if (c_.grad_final_normaliser)
      grad -= dot((const A*)c_.grad_final_normaliser, (const A*)c_.final_normaliser, state * c_.key_size, c_.key_size);
    return grad;
  }
  template <class T> static A dot(const T* a, const T* b, int64_t first, int64_t count) {
    V sum{};
    in_vectors<A>(count, [&](int64_t i, int lanes) { sum = fma(load(a + first + i, lanes), load(b + first + i, lanes), sum); });
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
    q_ = take(border * l_.padded_), k_ = take(border * l_.padded_);
    grad_q_ = take(border * l_.padded_), grad_k_ = take(border * l_.padded_);
  }

  const AttentionBackward& l_;
  const raglane_attention& c_;
  A* next_;
  int64_t set_, split_, key_head_, b_, first_head_, end_head_, first_block_, end_block_, begin_, length_;
  int64_t first_ = 0;  // element of the current steps
  int count_ = 0;
  Factors factors_;
  A *q_, *k_, *grad_q_, *grad_k_;  // their rows of the current steps

  static int64_t numbers(const AttentionBackward& l) { return 4 * border * l.padded_; }
  A* take(int64_t count) {
    A* begin = next_;
    next_ += whole_vectors<A>(count);
    return begin;
  }
  // Rows of zeros follow, which whole tiles read.
  void begin_rows() const {
    A* const all[] = {q_, k_, grad_q_, grad_k_};
    for (A* rows : all) memset((void*)rows, 0, border * l_.padded_ * sizeof(A));
    l_.read_keys(q_, c_.q, first_, count_, key_head_, l_.padded_);
    l_.read_keys(k_, c_.k, first_, count_, key_head_, l_.padded_);
  }
  void end_rows() const {
    write_rows(grad_q_, l_.q_parts_, (S*)c_.grad_q);
    write_rows(grad_k_, l_.k_parts_, (S*)c_.grad_k);
  }
  void write_rows(const A* from, A* parts, S* to) const {
    if (!to) return;
    for (int t = 0; t < count_; t++) {
      const int64_t at = ((first_ + t) * c_.key_heads + key_head_) * c_.key_size;
      if (l_.copies()) write_sum(parts + set_ * c_.elements * c_.key_heads * c_.key_size + at, from + t * l_.padded_, c_.key_size);
      else write_sum(to + at, from + t * l_.padded_, c_.key_size);
    }
  }
  // A row of a head in sums of this split.
  int64_t part_of(int t, int64_t head) const { return (split_ * c_.elements + first_ + t) * c_.heads + head; }
};

// Step by step, for decays of each key. The lanes of a vector are keys, so that sums over the columns of
// v, of which most gradients are made, add whole vectors. A unit is a block of columns of the state of a head: between two
// borders it computes its states again and keeps them in scratch.
template <class S> class AttentionBackward<S>::Steps : Task {
  using Task::b_, Task::begin_, Task::c_, Task::count_, Task::end_block_, Task::end_head_, Task::factors_, Task::first_;
  using Task::first_block_, Task::first_head_, Task::grad_k_, Task::grad_q_, Task::k_, Task::l_, Task::length_;
  using Task::part_of, Task::q_, Task::take;

 public:
  Steps(const AttentionBackward& loops, int64_t number, A* scratch) : Task(loops, number, scratch) {
    const int64_t padded = l_.padded_;
    decays_ = take(border * padded), grad_decays_ = take(border * padded), zeros_ = take(padded);
    states_ = take((border + 1) * unit_size(l_)), grads_ = take(l_.most_heads() * l_.most_blocks() * unit_size(l_));
    errors_ = take(border * columns), written_ = take(border * columns), grad_output_ = take(border * columns);
    grad_values_ = take(border * columns);
    memset((void*)zeros_, 0, padded * sizeof(A));
    // A row may be longer than its whole vectors, which are all that is written later.
    memset((void*)decays_, 0, border * padded * sizeof(A));
  }
  static int64_t numbers(const AttentionBackward& l) {
    return Task::numbers(l) + (2 * border + 1) * l.padded_ + 4 * border * columns +
           (border + 1 + l.most_heads() * l.most_blocks()) * unit_size(l);
  }

  void run() {
    each_unit([&](int64_t head, int64_t block, A* grad) { read(grad, of_unit(head, block, c_.grad_final), block); });
    for (int64_t i = (length_ + border - 1) / border - 1; i >= 0; i--) {
      first_ = begin_ + i * border;
      count_ = (int)(length_ - i * border < border ? length_ - i * border : border);
      Task::begin_rows();
      each_unit([&](int64_t head, int64_t block, A* grad) {
        if (block == first_block_) begin_head(head);
        const A* state = i > 0 ? l_.border_at(b_, first_, head) + block * columns : of_unit(head, block, c_.initial);
        read(states_, state, block);
        run_unit(head, block, grad);
        if (block == end_block_ - 1) end_head(head);
      });
      Task::end_rows();
    }
    each_unit([&](int64_t head, int64_t block, A* grad) { write(grad, (A*)of_unit(head, block, c_.grad_initial), block); });
  }

 private:
  static constexpr int quad = 4;  // columns whose sums are computed together

  A *decays_, *grad_decays_, *zeros_, *states_, *grads_, *errors_, *written_, *grad_output_, *grad_values_;
  A grad_gains_[border];

  static int64_t unit_size(const AttentionBackward& l) { return columns * l.padded_; }
  template <class Visit> void each_unit(Visit&& visit) {
    A* grad = grads_;
    for (int64_t head = first_head_; head < end_head_; head++)
      for (int64_t block = first_block_; block < end_block_; block++, grad += unit_size(l_)) visit(head, block, grad);
  }
  int columns_of(int64_t block) const {
    const int64_t rest = c_.value_size - block * columns;
    return (int)(rest < columns ? rest : columns);
  }
  const A* of_unit(int64_t head, int64_t block, const void* states) const {
    return states ? (const A*)states + (b_ * c_.heads + head) * l_.state_size() + block * columns : nullptr;
  }
  // The numbers of a unit to columns of whole vectors of keys, and back.
  void read(A* to, const A* from, int64_t block) const {
    const int count = columns_of(block);
    memset((void*)to, 0, unit_size(l_) * sizeof(A));
    if (!from) return;
    for (int64_t key = 0; key < c_.key_size; key++)
      for (int column = 0; column < count; column++) to[column * l_.padded_ + key] = from[key * c_.value_size + column];
  }
  void write(const A* from, A* to, int64_t block) const {
    const int count = columns_of(block);
    if (!to) return;
    for (int64_t key = 0; key < c_.key_size; key++)
      for (int column = 0; column < count; column++) to[key * c_.value_size + column] = from[column * l_.padded_ + key];
  }

  void begin_head(int64_t head) {
    A level = 0;
    l_.find_factors(factors_, first_, count_, head, level);
    for (int t = 0; t < count_; t++) {
      l_.read_decays(decays_ + t * l_.padded_, first_ + t, head);
      grad_gains_[t] = 0;
    }
    memset((void*)grad_decays_, 0, border * l_.padded_ * sizeof(A));
  }
  void end_head(int64_t head) {
    for (int t = 0; t < count_; t++) {
      const A* row = grad_decays_ + t * l_.padded_;
      l_.gain_parts_[part_of(t, head)] = grad_gains_[t];
      write_sum(l_.decay_parts_ + part_of(t, head) * c_.key_size, row, c_.key_size);
    }
  }

  // Errors, what they write, and gradients of outputs before the scale: a row of `columns` per step.
  void read_columns(int64_t head, int64_t block) {
    const int count = columns_of(block);
    memset((void*)errors_, 0, border * columns * sizeof(A));
    memset((void*)grad_output_, 0, border * columns * sizeof(A));
    for (int t = 0; t < count_; t++) {
      const int64_t at = ((first_ + t) * c_.heads + head) * c_.value_size + block * columns;
      // Of the next unit.
      fetch<S>(c_.v, at + columns);
      fetch<S>(c_.grad_output, at + columns);
      if (c_.delta) copy_row(errors_ + t * columns, (const A*)c_.errors + at, count);
      else copy_row(errors_ + t * columns, (const S*)c_.v + at, count);
      copy_row(written_ + t * columns, errors_ + t * columns, columns, factors_.gain[t]);
      if (c_.grad_output) copy_row(grad_output_ + t * columns, (const S*)c_.grad_output + at, count, (A)c_.scale);
    }
  }

  const A* before(int t, int column) const {
    return l_.resets(first_ + t) ? zeros_ : states_ + t * unit_size(l_) + column * l_.padded_;
  }

  void run_unit(int64_t head, int64_t block, A* grad) {
    const int count = (columns_of(block) + quad - 1) / quad * quad;
    read_columns(head, block);
    for (int t = 0; t < count_; t++)
      for (int column = 0; column < count; column += quad) advance(t, column);
    for (int t = count_ - 1; t >= 0; t--) {
      for (int column = 0; column < count; column += quad)
        c_.delta ? retreat<true>(t, column, grad) : retreat<false>(t, column, grad);
      if (l_.resets(first_ + t)) memset((void*)grad, 0, unit_size(l_) * sizeof(A));
    }
    // A row of v at once: a vector's load must not wait for the stores of single numbers.
    for (int t = 0; c_.grad_v && t < count_; t++)
      write_sum((S*)c_.grad_v + ((first_ + t) * c_.heads + head) * c_.value_size + block * columns,
                grad_values_ + t * columns, columns_of(block));
  }

  // Four columns of a step, forward.
  void advance(int t, int column) const {
    constexpr int N = quad;
    const A *decay = decays_ + t * l_.padded_, *k = k_ + t * l_.padded_, *from[N];
    A* to[N];
    V written[N];
    RAGLANE_EACH {
      from[i] = before(t, column + i), to[i] = states_ + (t + 1) * unit_size(l_) + (column + i) * l_.padded_;
      written[i] = splat_at(written_ + t * columns + column + i);
    }
    for (int64_t key = 0; key < l_.padded_; key += width) {
      const V its_key = load(k + key), factor = load(decay + key);
      RAGLANE_EACH {
        const V state = load(from[i] + key);
        store(to[i] + key, fma(its_key, written[i], factor * state));
      }
    }
  }

  // The same backward.
  template <bool DELTA> void retreat(int t, int column, A* grad) {
    constexpr int N = quad;
    const int64_t padded = l_.padded_, row = t * padded, at = t * columns + column;
    const A *q = q_ + row, *k = k_ + row, *decay = decays_ + row;
    A *of_q = grad_q_ + row, *of_k = grad_k_ + row, *of_decay = grad_decays_ + row;
    A* grads[N];
    const A *after[N], *from[N];
    V output[N], written[N], sum[N] = {};
    RAGLANE_EACH {
      grads[i] = grad + (column + i) * padded, from[i] = before(t, column + i);
      after[i] = states_ + (t + 1) * unit_size(l_) + (column + i) * padded;
      output[i] = splat_at(grad_output_ + at + i), written[i] = splat_at(written_ + at + i);
    }
    for (int64_t key = 0; key < padded; key += width) {
      const V query = load(q + key), its_key = load(k + key);
      V of_query = load(of_q + key), of_its_key = load(of_k + key);
      RAGLANE_EACH {
        const V g = fma(output[i], query, load(grads[i] + key));
        store(grads[i] + key, g);
        sum[i] = fma(g, its_key, sum[i]);
        of_query = fma(output[i], load(after[i] + key), of_query);
        of_its_key = fma(written[i], g, of_its_key);
      }
      store(of_q + key, of_query), store(of_k + key, of_its_key);
    }
    A values[N];
    RAGLANE_EACH {
      const A total = sum_of(sum[i]);
      grad_gains_[t] = grad_gains_[t] + total * errors_[at + i];
      values[i] = total * factors_.gain[t];
    }
    RAGLANE_EACH grad_values_[at + i] = values[i];
    V of_read[N];
    RAGLANE_EACH of_read[i] = splat<V>(-values[i]);
    for (int64_t key = 0; key < padded; key += width) {
      const V factor = load(decay + key), its_key = load(k + key);
      V of_its_key = load(of_k + key), of_its_decay = load(of_decay + key);
      RAGLANE_EACH {
        const V decayed = factor * load(from[i] + key);
        V g = load(grads[i] + key);
        if constexpr (DELTA) {
          of_its_key = fma(of_read[i], decayed, of_its_key);
          g = fma(of_read[i], its_key, g);
        }
        of_its_decay = fma(g, decayed, of_its_decay);
        store(grads[i] + key, g * factor);
      }
      if constexpr (DELTA) store(of_k + key, of_its_key);
      store(of_decay + key, of_its_decay);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
