// Linear attention, forward: in the order of time, by blocks of columns of v, which are independent of each other. The
// lanes of a vector are columns, and a sum over keys adds one product at a time, so that no bit depends on the blocks.
#pragma once

#include "recurrence/attention.h"

namespace raglane::RAGLANE_TARGET {

template <class S> class AttentionForward : AttentionCall<S> {
  using Base = AttentionCall<S>;
  using typename Base::A, typename Base::V, typename Base::Factors;
  using Base::c_, Base::width;

 public:
  explicit AttentionForward(const LinearAttention& call) : Base(call) {
    vectors_ = 4;
    while (vectors_ > 1 && c_.key_size * row_vectors(vectors_) * vector_bytes > block_bytes) vectors_ /= 2;
    while (vectors_ > 1 && (vectors_ / 2) * width >= c_.value_size) vectors_ /= 2;
    blocks_ = (c_.value_size + vectors_ * width - 1) / (vectors_ * width);
  }

  int32_t run() {
    const int64_t keys = whole_vectors<A>(c_.key_size);
    const int64_t numbers = c_.key_size * row_vectors(vectors_) * width + 4 * border * keys + keys + 64;
    return run_tasks<A>(c_.threads, Base::ordered_ * c_.heads * blocks_, numbers, Base::poison(),
                        [&](int64_t number, A* scratch) {
                          const int64_t block = number % blocks_, head = number / blocks_ % c_.heads;
                          run_block(Base::order_[number / blocks_ / c_.heads], head, block, scratch);
                        });
  }

 private:
  static constexpr int rows_ahead = 6;
  static constexpr int64_t block_bytes = 32 << 10;  // of a state in the nearest cache
  int vectors_;
  int64_t blocks_;

  // Adjacent columns of v, in 1, 2 or 4 vectors.
  struct Columns {
    int64_t first;
    int count, vectors;
  };
  // Vectors from one row of a state to the next. Rows of 2 or 4 would put a load at the distance of a page, which the
  // processor takes for a dependence, from a recent store.
  static constexpr int row_vectors(int vectors) { return vectors == 1 ? 1 : vectors + 1; }

  // Rows of q, k and decays of adjacent elements.
  struct Rows {
    const A *q, *k;
    int64_t stride;
    const A* decays;  // of each key, in whole vectors
  };

  void run_block(int64_t b, int64_t head, int64_t block, A* scratch) const {
    const int64_t begin = c_.offsets[b], end = c_.offsets[b + 1], size = c_.key_size;
    const int64_t column = block * vectors_ * width, rest = c_.value_size - column;
    Columns columns{column, (int)(rest < vectors_ * width ? rest : vectors_ * width), 1};
    while (columns.vectors * width < columns.count) columns.vectors *= 2;
    A *state = scratch, *rows = state + size * row_vectors(vectors_) * width, *normaliser = rows + 4 * border * whole_vectors<A>(size);
    const int64_t at = b * c_.heads + head;
    A level = 0;
    const int64_t row = row_vectors(columns.vectors) * width;
    memset((void*)state, 0, size * row * sizeof(A));
    const int64_t corner = at * Base::state_size() + columns.first;
    for (int64_t i = 0; c_.initial && i < size; i++)
      memcpy((void*)(state + i * row), (const A*)c_.initial + corner + i * c_.value_size, columns.count * sizeof(A));
    if (c_.log_gain) {
      level = Base::number(c_.initial_stabiliser, at);
      memset((void*)normaliser, 0, whole_vectors<A>(size) * sizeof(A));
      if (c_.initial_normaliser) memcpy((void*)normaliser, (const A*)c_.initial_normaliser + at * size, size * sizeof(A));
    }
    // The state, and the normaliser if there is one.
    const auto write = [&](A* to, A* of_normaliser) {
      for (int64_t i = 0; i < size; i++)
        memcpy((void*)(to + columns.first + i * c_.value_size), state + i * row, columns.count * sizeof(A));
      if (c_.log_gain && block == 0) memcpy((void*)of_normaliser, normaliser, size * sizeof(A));
    };
    for (int64_t first = begin; first < end; first += border) {
      const int count = (int)(end - first < border ? end - first : border);
      if (first > begin && c_.borders) write(Base::border_at(b, first, head), Base::normaliser_border_at(b, first, head));
      Factors factors;
      Base::find_factors(factors, first, count, head, level, block == 0);
      const Rows current = rows_of(first, count, head, rows);
      A divisors[border];
      if (c_.log_gain) normalise(current, factors, first, count, head, normaliser, divisors, block == 0);
      with_vectors(columns, current, factors, first, count, head, state, divisors);
    }
    A* of_normaliser = c_.log_gain ? (A*)c_.final_normaliser + at * size : nullptr;
    write((A*)c_.final + at * Base::state_size(), of_normaliser);
    if (c_.log_gain && block == 0) ((A*)c_.final_stabiliser)[at] = level;
  }

  Rows rows_of(int64_t first, int count, int64_t head, A* scratch) const {
    const int64_t size = c_.key_size, padded = whole_vectors<A>(size), stride = c_.key_heads * size;
    const int64_t key_head = head / (c_.heads / c_.key_heads), at = first * stride + key_head * size;
    Rows rows{nullptr, nullptr, stride, nullptr};
    if constexpr (sizeof(S) == sizeof(A)) {
      rows.q = (const A*)c_.q + at, rows.k = (const A*)c_.k + at;
    } else {
      Base::read_keys(scratch, c_.q, first, count, key_head, padded);
      Base::read_keys(scratch + border * padded, c_.k, first, count, key_head, padded);
      rows.q = scratch, rows.k = scratch + border * padded, rows.stride = padded;
    }
    if (!c_.per_key || !c_.log_decay) return rows;
    A* decays = scratch + 2 * border * padded;
    for (int t = 0; t < count; t++) Base::read_decays(decays + t * padded, first + t, head);
    rows.decays = decays;
    return rows;
  }

  // Advance the normaliser, whose vectors are keys, and find the divisors of the outputs.
  void normalise(const Rows& rows, const Factors& factors, int64_t first, int count, int64_t head, A* normaliser,
                 A* divisors, bool saves) const {
    for (int t = 0; t < count; t++) {
      const bool is_reset = Base::resets(first + t);
      const V decay = splat<V>(factors.decay[t]), gain = splat<V>(factors.gain[t]);
      V sum{};
      in_vectors<A>(c_.key_size, [&](int64_t i, int lanes) {
        const V before = is_reset ? V{} : load(normaliser + i);
        const V after = fma(load(rows.k + t * rows.stride + i, lanes), gain, decay * before);
        store(normaliser + i, after);
        sum = fma(load(rows.q + t * rows.stride + i, lanes), after, sum);
      });
      const A read = (A)c_.scale * sum_of(sum);
      divisors[t] = Base::divisor(read, factors.floor[t]);
      const int64_t at = (first + t) * c_.heads + head;
      if (saves && c_.reads) ((A*)c_.reads)[at] = read;
    }
  }

  template <class... Arguments>
  void with_vectors(const Columns& columns, const Rows& rows, Arguments&&... arguments) const {
    switch (columns.vectors) {
      case 1: return with_kind<1>(columns, rows, arguments...);
      case 2: return with_kind<2>(columns, rows, arguments...);
      default: return with_kind<4>(columns, rows, arguments...);
    }
  }
  enum Decay { none, of_head, of_key };
  template <int N, class... Arguments>
  void with_kind(const Columns& columns, const Rows& rows, Arguments&&... arguments) const {
    const auto with_delta = [&]<bool DELTA>() {
      if (rows.decays) advance<N, DELTA, of_key>(columns, rows, arguments...);
      else if (c_.log_decay || c_.log_gain) advance<N, DELTA, of_head>(columns, rows, arguments...);
      else advance<N, DELTA, none>(columns, rows, arguments...);
    };
    c_.delta ? with_delta.template operator()<true>() : with_delta.template operator()<false>();
  }

  template <int N, bool DELTA, Decay DECAY>
  void advance(const Columns& columns, const Rows& rows, const Factors& factors, int64_t first, int count, int64_t head,
               A* state, const A* divisors) const {
    constexpr int row = row_vectors(N);
    const int64_t size = c_.key_size;
    int lanes[N];
    RAGLANE_EACH lanes[i] = i * width < columns.count ? lanes_of<A>(i * width, columns.count) : 0;
    for (int t = 0; t < count; t++) {
      if (Base::resets(first + t)) memset((void*)state, 0, size * row * width * sizeof(A));
      const A *q = rows.q + t * rows.stride, *k = rows.k + t * rows.stride;
      const A* decays = rows.decays + (DECAY == of_key ? t * whole_vectors<A>(size) : 0);
      const int64_t at = ((first + t) * c_.heads + head) * c_.value_size + columns.first;
      const V decay = splat<V>(factors.decay[t]), gain = splat<V>(factors.gain[t]);
      const int64_t ahead = at + rows_ahead * c_.heads * c_.value_size;
      RAGLANE_EACH fetch<S>(c_.v, ahead + i * width);
      RAGLANE_EACH fetch<S>(c_.output, ahead + i * width);
      for (int64_t key = 0; key < size; key += width) {
        fetch<A>(q, rows_ahead * rows.stride + key);
        fetch<A>(k, rows_ahead * rows.stride + key);
      }
      V written[N], output[N];
      RAGLANE_EACH written[i] = load((const S*)c_.v + at + i * width, lanes[i]);
      if constexpr (DELTA) {
        V read[N] = {};
        for (int64_t key = 0; key < size; key++) {
          const V factor = DECAY == of_key ? splat_at(k + key) * splat_at(decays + key) : splat_at(k + key);
          RAGLANE_EACH read[i] = fma(factor, load(state + (key * row + i) * width), read[i]);
        }
        RAGLANE_EACH written[i] = written[i] - (DECAY == of_head ? decay * read[i] : read[i]);
        if (c_.errors)
          RAGLANE_EACH store((A*)c_.errors + at + i * width, written[i], lanes[i]);
      }
      RAGLANE_EACH written[i] = written[i] * gain;
      RAGLANE_EACH output[i] = V{};
      for (int64_t key = 0; key < size; key++) {
        const V of_q = splat_at(q + key), of_k = splat_at(k + key);
        const V factor = DECAY == of_key ? splat_at(decays + key) : decay;
        RAGLANE_EACH {
          A* place = state + (key * row + i) * width;
          const V before = load(place);
          const V after = fma(of_k, written[i], DECAY == none ? before : factor * before);
          store(place, after);
          output[i] = fma(of_q, after, output[i]);
        }
      }
      RAGLANE_EACH output[i] = output[i] * (A)c_.scale;
      if (c_.log_gain) RAGLANE_EACH output[i] = output[i] / splat<V>(divisors[t]);
      RAGLANE_EACH store((S*)c_.output + at + i * width, output[i], lanes[i]);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
