// Linear attention, backward. The lanes of a vector are keys, so that sums over the columns of v, of which most gradients
// are made, add whole vectors. A task is a sequence, a head of k and a set of its units: some columns of the state of a
// head of v, or its normaliser. It runs from border to border, backwards: a unit computes its states of these steps again
// and keeps them in scratch.
#pragma once

#include "recurrence/attention.h"

namespace raglane::RAGLANE_TARGET {

template <class S> class AttentionBackward : AttentionCall<S> {
  using Base = AttentionCall<S>;
  using typename Base::A, typename Base::V, typename Base::Factors;
  using Base::c_, Base::width;

 public:
  explicit AttentionBackward(const LinearAttention& call) : Base(call), padded_(whole_vectors<A>(c_.key_size)) {
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
    const int32_t status = run_tasks<A>(c_.threads, Base::ordered_ * c_.key_heads * sets, numbers(), Base::poison(),
                                        [&](int64_t number, A* scratch) {
                                          Task task(*this, number, scratch);
                                          task.run();
                                        });
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
  static constexpr int columns = 16, quad = 4;  // of a unit; of v, whose sums are computed together
  static constexpr int least_sets = 8;

  const int64_t padded_;             // keys of whole vectors
  int64_t parts_, splits_, blocks_;  // of the heads of a head of k; of the units of a head; units of a head's state
  A *q_parts_ = nullptr, *k_parts_ = nullptr, *decay_parts_ = nullptr, *gain_parts_ = nullptr;

  int64_t per_key_head() const { return c_.heads / c_.key_heads; }
  int64_t unit_size() const { return columns * padded_; }
  int64_t most_units() const {
    const int64_t heads = (per_key_head() + parts_ - 1) / parts_, blocks = (blocks_ + splits_ - 1) / splits_;
    return heads * (blocks + (c_.log_gain ? 1 : 0));
  }
  int64_t numbers() const {
    return 6 * border * padded_ + padded_ + (border + 1 + most_units()) * unit_size() + 4 * border * columns;
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

  class Task {
   public:
    Task(const AttentionBackward& loops, int64_t number, A* scratch) : l_(loops), c_(loops.c_), next_(scratch) {
      const int64_t sets = l_.parts_ * l_.splits_, padded = l_.padded_, part = number % sets / l_.splits_;
      set_ = number % sets, split_ = number % l_.splits_;
      key_head_ = number / sets % c_.key_heads, b_ = l_.order_[number / sets / c_.key_heads];
      const int64_t heads = l_.per_key_head();
      first_head_ = key_head_ * heads + heads * part / l_.parts_, end_head_ = key_head_ * heads + heads * (part + 1) / l_.parts_;
      first_block_ = l_.blocks_ * split_ / l_.splits_, end_block_ = l_.blocks_ * (split_ + 1) / l_.splits_;
      q_ = take(border * padded), k_ = take(border * padded), grad_q_ = take(border * padded), grad_k_ = take(border * padded);
      decays_ = take(border * padded), grad_decays_ = take(border * padded), zeros_ = take(padded);
      states_ = take((border + 1) * l_.unit_size()), grads_ = take(l_.most_units() * l_.unit_size());
      errors_ = take(border * columns), written_ = take(border * columns), grad_output_ = take(border * columns);
      grad_values_ = take(border * columns);
      memset((void*)zeros_, 0, padded * sizeof(A));
    }

    void run() {
      const int64_t begin = c_.offsets[b_], length = c_.offsets[b_ + 1] - begin;
      each_unit([&](int64_t head, int64_t block, A* grad) {
        read(grad, of_unit(head, block, c_.grad_final, c_.grad_final_normaliser), block);
      });
      for (int64_t i = (length - 1) / border; i >= 0; i--) {
        first_ = begin + i * border;
        count_ = (int)(length - i * border < border ? length - i * border : border);
        read_rows(q_, c_.q), read_rows(k_, c_.k);
        memset((void*)grad_q_, 0, border * l_.padded_ * sizeof(A));
        memset((void*)grad_k_, 0, border * l_.padded_ * sizeof(A));
        int64_t current = -1;
        each_unit([&](int64_t head, int64_t block, A* grad) {
          if (head != current) begin_head(head, i == 0);
          current = head;
          const A* state = i > 0 ? at_border(head, block) : of_unit(head, block, c_.initial, c_.initial_normaliser);
          read(states_, state, block);
          run_unit(head, block, grad);
          if (block == last_block()) end_head(head);
        });
        write_rows(grad_q_, l_.q_parts_, (S*)c_.grad_q);
        write_rows(grad_k_, l_.k_parts_, (S*)c_.grad_k);
      }
      each_unit([&](int64_t head, int64_t block, A* grad) {
        write(grad, (A*)of_unit(head, block, c_.grad_initial, c_.grad_initial_normaliser), block);
      });
    }

   private:
    const AttentionBackward& l_;
    const raglane_attention& c_;
    A* next_;
    int64_t set_, split_, key_head_, b_, first_head_, end_head_, first_block_, end_block_;
    A *q_, *k_, *grad_q_, *grad_k_, *decays_, *grad_decays_, *zeros_, *states_, *grads_, *errors_, *written_, *grad_output_;
    A* grad_values_;
    int64_t first_;  // element of the current steps
    int count_;
    Factors factors_;
    A divisors_[border], grad_gains_[border];

    A* take(int64_t count) {
      A* begin = next_;
      next_ += whole_vectors<A>(count);
      return begin;
    }

    // The unit of a head's normaliser is block -1, the first of the first split.
    bool has_normaliser() const { return c_.log_gain && split_ == 0; }
    int64_t last_block() const { return end_block_ - 1; }
    template <class Visit> void each_unit(Visit&& visit) {
      A* grad = grads_;
      for (int64_t head = first_head_; head < end_head_; head++)
        for (int64_t block = has_normaliser() ? -1 : first_block_; block < end_block_; block = block < 0 ? first_block_ : block + 1) {
          visit(head, block, grad);
          grad += l_.unit_size();
        }
    }
    int columns_of(int64_t block) const {
      if (block < 0) return 1;
      const int64_t rest = c_.value_size - block * columns;
      return (int)(rest < columns ? rest : columns);
    }
    const A* of_unit(int64_t head, int64_t block, const void* states, const void* normalisers) const {
      const int64_t at = b_ * c_.heads + head;
      if (block < 0) return normalisers ? (const A*)normalisers + at * c_.key_size : nullptr;
      return states ? (const A*)states + at * l_.state_size() + block * columns : nullptr;
    }
    const A* at_border(int64_t head, int64_t block) const {
      return block < 0 ? l_.normaliser_border_at(b_, first_, head) : l_.border_at(b_, first_, head) + block * columns;
    }
    // The numbers of a unit to columns of whole vectors of keys, and back.
    void read(A* to, const A* from, int64_t block) const {
      const int64_t stride = block < 0 ? 1 : c_.value_size;
      const int count = columns_of(block);
      memset((void*)to, 0, l_.unit_size() * sizeof(A));
      if (!from) return;
      for (int64_t key = 0; key < c_.key_size; key++)
        for (int column = 0; column < count; column++) to[column * l_.padded_ + key] = from[key * stride + column];
    }
    void write(const A* from, A* to, int64_t block) const {
      const int64_t stride = block < 0 ? 1 : c_.value_size;
      const int count = columns_of(block);
      if (!to) return;
      for (int64_t key = 0; key < c_.key_size; key++)
        for (int column = 0; column < count; column++) to[key * stride + column] = from[column * l_.padded_ + key];
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

    void begin_head(int64_t head, bool is_first) {
      const int64_t at = first_ * c_.heads + head;
      A level = 0;
      if (c_.log_gain) level = is_first ? l_.initial_level(b_ * c_.heads + head) : ((const A*)c_.levels)[at - c_.heads];
      l_.find_factors(factors_, first_, count_, head, level);
      for (int t = 0; t < count_; t++) {
        A* row = decays_ + t * l_.padded_;
        const int64_t element = at + t * c_.heads;
        divisors_[t] = c_.log_gain ? l_.divisor(((const A*)c_.reads)[element], factors_.floor[t]) : 1;
        grad_gains_[t] = 0;
        if (c_.per_key && c_.log_decay) {
          copy_row(row, (const A*)c_.log_decay + element * c_.key_size, c_.key_size);
          exponentials(row, l_.padded_);
        } else {
          const V decay = splat<V>(factors_.decay[t]);
          for (int64_t key = 0; key < l_.padded_; key += width) store(row + key, decay);
        }
      }
      memset((void*)grad_decays_, 0, border * l_.padded_ * sizeof(A));
    }
    void end_head(int64_t head) {
      const int64_t rows = split_ * c_.elements * c_.heads;
      for (int t = 0; t < count_; t++) {
        const int64_t at = (first_ + t) * c_.heads + head;
        const A* row = grad_decays_ + t * l_.padded_;
        l_.gain_parts_[rows + at] = c_.log_gain ? grad_gains_[t] * factors_.gain[t] : grad_gains_[t];
        if (c_.per_key) {
          write_sum(l_.decay_parts_ + (rows + at) * c_.key_size, row, c_.key_size);
          continue;
        }
        V sum{};
        for (int64_t key = 0; key < l_.padded_; key += width) sum = sum + load(row + key);
        l_.decay_parts_[rows + at] = sum_of(sum);
      }
    }

    // Errors, what they write, and gradients of outputs before the division and the scale: a row of `columns` per step.
    void read_columns(int64_t head, int64_t block) {
      const int count = columns_of(block);
      memset((void*)errors_, 0, border * columns * sizeof(A));
      memset((void*)grad_output_, 0, border * columns * sizeof(A));
      for (int t = 0; t < count_; t++) {
        const int64_t row = (first_ + t) * c_.heads + head, at = row * c_.value_size + block * columns;
        A *errors = errors_ + t * columns, *grads = grad_output_ + t * columns;
        const A factor = (A)c_.scale / divisors_[t];
        // Of the next unit.
        fetch<S>(c_.v, at + columns);
        fetch<S>(c_.grad_output, at + columns);
        if (block < 0) {
          errors[0] = 1;
          const A read = ((const A*)c_.reads)[row], size = read < 0 ? -read : read;
          const bool divides = size > factors_.floor[t] || size != size;
          if (divides) grads[0] = -(read < 0 ? -factor : factor) * l_.product_of_outputs(row);
        } else {
          if (c_.delta) narrow_row(errors, (const A*)c_.errors + at, count, 1);
          else narrow_row(errors, (const S*)c_.v + at, count, 1);
          if (c_.grad_output) narrow_row(grads, (const S*)c_.grad_output + at, count, factor);
        }
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
      return l_.resets(first_ + t) ? zeros_ : states_ + t * l_.unit_size() + column * l_.padded_;
    }

    void run_unit(int64_t head, int64_t block, A* grad) {
      const int count = (columns_of(block) + quad - 1) / quad * quad;
      read_columns(head, block);
      const bool decays = c_.log_decay || c_.log_gain;
      for (int t = 0; t < count_; t++)
        for (int column = 0; column < count; column += quad) decays ? advance<true>(t, column) : advance<false>(t, column);
      for (int t = count_ - 1; t >= 0; t--) {
        for (int column = 0; column < count; column += quad) {
          if (c_.delta) decays ? retreat<true, true>(t, column, grad) : retreat<true, false>(t, column, grad);
          else decays ? retreat<false, true>(t, column, grad) : retreat<false, false>(t, column, grad);
        }
        if (l_.resets(first_ + t)) memset((void*)grad, 0, l_.unit_size() * sizeof(A));
      }
      if (block >= 0 && c_.grad_v) write_values(head, block);
    }

    // Four columns of a step, forward.
    template <bool DECAYS> void advance(int t, int column) const {
      constexpr int N = quad;
      const A *decay = decays_ + t * l_.padded_, *k = k_ + t * l_.padded_, *from[N];
      A* to[N];
      V written[N];
      RAGLANE_EACH {
        from[i] = before(t, column + i), to[i] = states_ + (t + 1) * l_.unit_size() + (column + i) * l_.padded_;
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
        after[i] = states_ + (t + 1) * l_.unit_size() + (column + i) * padded;
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
      if constexpr (DELTA || DECAYS) {
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
    }
    // A row of v at once: a vector's load must not wait for the stores of single numbers.
    void write_values(int64_t head, int64_t block) const {
      const int count = columns_of(block);
      for (int t = 0; t < count_; t++)
        write_sum((S*)c_.grad_v + ((first_ + t) * c_.heads + head) * c_.value_size + block * columns,
                  grad_values_ + t * columns, count);
    }
  };
};

}  // namespace raglane::RAGLANE_TARGET
