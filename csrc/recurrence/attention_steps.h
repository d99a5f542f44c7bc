// Linear attention, backward step by step, for the delta rule and decays of each key. The lanes of a vector are keys, so
// that sums over the columns of v, of which most gradients are made, add whole vectors. A unit is a block of columns of the
// state of a head: between two borders it computes its states again and keeps them in scratch.
#pragma once

#include "recurrence/attention_backward.h"

namespace raglane::RAGLANE_TARGET {

template <class S> class AttentionBackward<S>::Steps : Task {
  using Task::b_, Task::begin_, Task::c_, Task::count_, Task::end_block_, Task::end_head_, Task::factors_, Task::first_;
  using Task::first_block_, Task::first_head_, Task::l_, Task::length_, Task::part_of, Task::take;

 public:
  Steps(const AttentionBackward& loops, int64_t number, A* scratch) : Task(loops, number, scratch) {
    const int64_t padded = l_.padded_;
    q_ = take(border * padded), k_ = take(border * padded), grad_q_ = take(border * padded), grad_k_ = take(border * padded);
    decays_ = take(border * padded), grad_decays_ = take(border * padded), zeros_ = take(padded);
    states_ = take((border + 1) * unit_size(l_)), grads_ = take(l_.most_heads() * l_.most_blocks() * unit_size(l_));
    errors_ = take(border * columns), written_ = take(border * columns), grad_output_ = take(border * columns);
    grad_values_ = take(border * columns);
    memset((void*)zeros_, 0, padded * sizeof(A));
    // A row may be longer than its whole vectors, which are all that is written later.
    const int64_t all = border * padded * sizeof(A);
    memset((void*)q_, 0, all), memset((void*)k_, 0, all), memset((void*)decays_, 0, all);
  }
  static int64_t numbers(const AttentionBackward& l) {
    return 6 * border * l.padded_ + l.padded_ + (border + 1 + l.most_heads() * l.most_blocks()) * unit_size(l) + 4 * border * columns;
  }

  void run() {
    each_unit([&](int64_t head, int64_t block, A* grad) { read(grad, of_unit(head, block, c_.grad_final), block); });
    for (int64_t i = (length_ - 1) / border; i >= 0; i--) {
      first_ = begin_ + i * border;
      count_ = (int)(length_ - i * border < border ? length_ - i * border : border);
      Task::read_rows(q_, c_.q), Task::read_rows(k_, c_.k);
      memset((void*)grad_q_, 0, border * l_.padded_ * sizeof(A));
      memset((void*)grad_k_, 0, border * l_.padded_ * sizeof(A));
      each_unit([&](int64_t head, int64_t block, A* grad) {
        if (block == first_block_) begin_head(head);
        const A* state = i > 0 ? l_.border_at(b_, first_, head) + block * columns : of_unit(head, block, c_.initial);
        read(states_, state, block);
        run_unit(head, block, grad);
        if (block == end_block_ - 1) end_head(head);
      });
      Task::write_rows(grad_q_, l_.q_parts_, (S*)c_.grad_q);
      Task::write_rows(grad_k_, l_.k_parts_, (S*)c_.grad_k);
    }
    each_unit([&](int64_t head, int64_t block, A* grad) { write(grad, (A*)of_unit(head, block, c_.grad_initial), block); });
  }

 private:
  static constexpr int quad = 4;  // columns whose sums are computed together

  A *q_, *k_, *grad_q_, *grad_k_, *decays_, *grad_decays_, *zeros_, *states_, *grads_, *errors_, *written_, *grad_output_;
  A* grad_values_;
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
      A* row = decays_ + t * l_.padded_;
      grad_gains_[t] = 0;
      if (c_.per_key && c_.log_decay) {
        copy_row(row, (const A*)c_.log_decay + ((first_ + t) * c_.heads + head) * c_.key_size, c_.key_size);
        exponentials(row, whole_vectors<A>(c_.key_size));
      } else {
        const V decay = splat<V>(factors_.decay[t]);
        for (int64_t key = 0; key < l_.padded_; key += width) store(row + key, decay);
      }
    }
    memset((void*)grad_decays_, 0, border * l_.padded_ * sizeof(A));
  }
  void end_head(int64_t head) {
    for (int t = 0; t < count_; t++) {
      const A* row = grad_decays_ + t * l_.padded_;
      l_.gain_parts_[part_of(t, head)] = grad_gains_[t];
      if (c_.per_key) {
        write_sum(l_.decay_parts_ + part_of(t, head) * c_.key_size, row, c_.key_size);
        continue;
      }
      V sum{};
      for (int64_t key = 0; key < l_.padded_; key += width) sum = sum + load(row + key);
      l_.decay_parts_[part_of(t, head)] = sum_of(sum);
    }
  }

  // Errors, what they write, and gradients of outputs before the scale: a row of `columns` per step.
  void read_columns(int64_t head, int64_t block) {
    const int count = columns_of(block);
    memset((void*)errors_, 0, border * columns * sizeof(A));
    memset((void*)grad_output_, 0, border * columns * sizeof(A));
    for (int t = 0; t < count_; t++) {
      const int64_t at = ((first_ + t) * c_.heads + head) * c_.value_size + block * columns;
      A* errors = errors_ + t * columns;
      // Of the next unit.
      fetch<S>(c_.v, at + columns);
      fetch<S>(c_.grad_output, at + columns);
      if (c_.delta) narrow_row(errors, (const A*)c_.errors + at, count, 1);
      else narrow_row(errors, (const S*)c_.v + at, count, 1);
      if (c_.grad_output) narrow_row(grad_output_ + t * columns, (const S*)c_.grad_output + at, count, (A)c_.scale);
      for (int column = 0; column < columns; column++) written_[t * columns + column] = errors[column] * factors_.gain[t];
    }
  }
template <class T> static void narrow_row(A* to, const T* from, int count, A factor) {
    for (int i = 0; i < count; i += width) {
      const int here = count - i < width ? count - i : width;
      store(to + i, load(from + i, here) * factor, here);
    }
  }

  const A* before(int t, int column) const {
    return l_.resets(first_ + t) ? zeros_ : states_ + t * unit_size(l_) + column * l_.padded_;
  }

  void run_unit(int64_t head, int64_t block, A* grad) {
    const int count = (columns_of(block) + quad - 1) / quad * quad;
    read_columns(head, block);
    const bool decays = c_.log_decay;
    for (int t = 0; t < count_; t++)
      for (int column = 0; column < count; column += quad) decays ? advance<true>(t, column) : advance<false>(t, column);
    for (int t = count_ - 1; t >= 0; t--) {
      for (int column = 0; column < count; column += quad) {
        if (!c_.delta) retreat<false, true>(t, column, grad);
        else decays ? retreat<true, true>(t, column, grad) : retreat<true, false>(t, column, grad);
      }
      if (l_.resets(first_ + t)) memset((void*)grad, 0, unit_size(l_) * sizeof(A));
    }
    if (c_.grad_v) write_values(head, block);
  }

  // Four columns of a step, forward.
  template <bool DECAYS> void advance(int t, int column) const {
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
        store(to[i] + key, fma(its_key, written[i], DECAYS ? factor * state : state));
      }
    }
  }

  // The same backward.
  template <bool DELTA, bool DECAYS> void retreat(int t, int column, A* grad) {
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
        const V decayed = DECAYS ? factor * load(from[i] + key) : load(from[i] + key);
        V g = load(grads[i] + key);
        if constexpr (DELTA) {
          of_its_key = fma(of_read[i], decayed, of_its_key);
          g = fma(of_read[i], its_key, g);
        }
        of_its_decay = fma(g, decayed, of_its_decay);
        store(grads[i] + key, DECAYS ? g * factor : g);
      }
      if constexpr (DELTA) store(of_k + key, of_its_key);
      if constexpr (DECAYS) store(of_decay + key, of_its_decay);
    }
  }
  // A row of v at once: a vector's load must not wait for the stores of single numbers.
  void write_values(int64_t head, int64_t block) const {
    const int count = columns_of(block);
    for (int t = 0; t < count_; t++)
      write_sum((S*)c_.grad_v + ((first_ + t) * c_.heads + head) * c_.value_size + block * columns,
                grad_values_ + t * columns, count);
  }
};

}  // namespace raglane::RAGLANE_TARGET
