// One step of a block of linear attention, between its projections; recurrences.h has its equations.
#pragma once

#include "recurrence/step.h"

namespace raglane::RAGLANE_TARGET {

template <class A> class AttentionStep {
 public:
  using V = Vec<A>;

  explicit AttentionStep(const raglane_attention_step& call) : c_(call) {}

  int32_t run() {
    const int64_t channels = 2 * c_.key_heads * c_.key_size + c_.heads * c_.value_size;
    Scratch<A> memory;
    if (!memory.reserve(channels + 2 * whole_vectors<A>(c_.heads), c_.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
    gains_ = memory.get(), decays_ = gains_ + whole_vectors<A>(c_.heads), inner_ = decays_ + whole_vectors<A>(c_.heads);
    const Window<A> window{channels, c_.taps, c_.kept, c_.channel_stride, c_.tap_stride, (const A*)c_.conv_weight,
                           (const A*)c_.conv_bias};
    for (int64_t row = 0; row < c_.rows; row++) {
      window.advance(inner_, (const A*)c_.mixed + row * c_.mixed_stride, (A*)c_.earlier + row * c_.row_stride);
      const int64_t first[] = {c_.q_first, c_.k_first};
      for (int64_t g = 0; c_.unit && g < 2 * c_.key_heads; g++)
        unite(inner_ + first[g % 2] + g / 2 * c_.key_size);
      set_gates(row);
      for (int64_t head = 0; head < c_.heads; head++) attend(row, head);
      finish(row);
    }
    return RAGLANE_OK;
  }

 private:
  static constexpr int width = Lanes<A>::width;

  const raglane_attention_step& c_;
  A *gains_ = nullptr, *decays_ = nullptr, *inner_ = nullptr;

  A* output(int64_t row) const { return (A*)c_.output + row * c_.heads * c_.value_size; }

  // Divide by the root of the sum of squares.
  void unite(A* values) const {
    V squares = {};
    for (int64_t i = 0; i < c_.key_size; i += width) {
      const V x = load(values + i, lanes_of<A>(i, c_.key_size));
      squares = fma(x, x, squares);
    }
    const V root = square_root(splat<V>(sum_of(squares) + (A)1e-6));
    for (int64_t i = 0; i < c_.key_size; i += width) {
      const int lanes = lanes_of<A>(i, c_.key_size);
      store(values + i, load(values + i, lanes) / root, lanes);
    }
  }

  void set_gates(int64_t row) const {
    for (int64_t h = 0; h < c_.heads; h += width) {
      const int lanes = lanes_of<A>(h, c_.heads);
      V d = load((const A*)c_.dt + row * c_.dt_stride + h, lanes) + load((const A*)c_.dt_bias + h, lanes);
      d = at_most((A)c_.most_dt, at_least((A)c_.least_dt, soften<A>(d)));
      V rate = load((const A*)c_.A + h, lanes);
      exp<A, 1>(&rate);
      V decay = -d * rate;
      exp<A, 1>(&decay);
      store(decays_ + h, decay);
      const V gain = c_.beta ? (A)c_.beta_scale * sigmoid<A>(load((const A*)c_.beta + row * c_.beta_stride + h, lanes)) : d;
      store(gains_ + h, gain);
    }
  }

  void attend(int64_t row, int64_t head) const {
    const int64_t of_group = head / (c_.heads / c_.key_heads) * c_.key_size, keys = c_.key_size, values = c_.value_size;
    const A *q = inner_ + c_.q_first + of_group, *k = inner_ + c_.k_first + of_group;
    const A* v = inner_ + c_.v_first + head * values;
    const A gain = gains_[head], skip = c_.D ? ((const A*)c_.D)[head] : 0, scale = (A)c_.scale;
    const V decay = splat<V>(decays_[head]);
    A *state = (A*)c_.state + (row * c_.heads + head) * keys * values, *o = output(row) + head * values;
    if (c_.transposed) {
      for (int64_t j = 0; j < values; j++) {
        const V written = splat<V>(gain * v[j]);
        V sum = {};
        for (int64_t i = 0; i < keys; i += width) {
          const int lanes = lanes_of<A>(i, keys);
          A* at = state + j * keys + i;
          const V next = fma(written, load(k + i, lanes), decay * load(at, lanes));
          store(at, next, lanes);
          sum = fma(next, load(q + i, lanes), sum);
        }
        o[j] = scale * sum_of(sum) + skip * v[j];
      }
      return;
    }
    for (int64_t j = 0; j < values; j += width) {
      const int lanes = lanes_of<A>(j, values);
      const V value = load(v + j, lanes);
      V read = {}, sum = {};
      for (int64_t i = 0; c_.delta && i < keys; i++)
        read = fma(splat_at(k + i), decay * load(state + i * values + j, lanes), read);
      const V written = splat<V>(gain) * (value - read);
      for (int64_t i = 0; i < keys; i++) {
        A* at = state + i * values + j;
        const V next = fma(splat_at(k + i), written, decay * load(at, lanes));
        store(at, next, lanes);
        sum = fma(splat_at(q + i), next, sum);
      }
      store(o + j, fma(splat<V>(skip), value, splat<V>(scale) * sum), lanes);
    }
  }

  // The gate and the norm of groups of columns, in the order of the block.
  void finish(int64_t row) const {
    const int64_t columns = c_.heads * c_.value_size, size = columns / c_.norm_groups;
    const A* gate = (const A*)c_.gate + row * c_.gate_stride;
    A* o = output(row);
    if (c_.gates_first) multiply_by_gate(o, gate, columns);
    for (int64_t first = 0; first < columns; first += size)
      normalise<A>(o + first, o + first, (const A*)c_.norm + first % c_.norm_size, size, (A)c_.norm_eps);
    if (!c_.gates_first) multiply_by_gate(o, gate, columns);
  }
  static void multiply_by_gate(A* o, const A* gate, int64_t columns) {
    for (int64_t i = 0; i < columns; i += width) {
      const int lanes = lanes_of<A>(i, columns);
      store(o + i, load(o + i, lanes) * silu<A>(load(gate + i, lanes)), lanes);
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
