// One step of Mamba's block for a few sequences, and what steps of other blocks share; recurrences.h has the equations.
//
// Weights are read once, as they are: a sum of a product is that of its lanes, which does not depend on other rows; or it
// has the order of other kernels, so that a step has the bits of a whole sequence. In the scan lanes are states, which are
// read and written in place.
#pragma once

#include "gemm/gemm.h"
#include "recurrence/selective.h"

namespace raglane::RAGLANE_TARGET {

// Divide a row by the root of the sum of its squares / `parts` + eps, times a weight if there is one.
template <class A> void normalise(A* to, const A* from, const void* weight, int64_t count, int64_t parts, double eps) {
  using V = Vec<A>;
  V squares = {};
  in_vectors<A>(count, [&](int64_t i, int lanes) {
    const V x = load(from + i, lanes);
    squares = fma(x, x, squares);
  });
  const V root = square_root(splat<V>(sum_of(squares) / (A)parts + (A)eps));
  in_vectors<A>(count, [&](int64_t i, int lanes) {
    const V x = load(from + i, lanes) / root;
    store(to + i, weight ? x * load((const A*)weight + i, lanes) : x, lanes);
  });
}

// The convolution before a recurrence, whose state has the last inputs, oldest first.
template <class A> struct Window {
  using V = Vec<A>;
  static constexpr int width = Lanes<A>::width;
  int64_t channels, taps, kept, channel_stride, tap_stride;
  const A *weight, *bias;  // (channels, taps), and null or (channels)

  // The convolution of one element or its silu, and the state after it.
  template <bool SILU = true> void advance(A* to, const A* x, A* state) const {
    for (int64_t first = 0; first < channels; first += width) {
      const int lanes = lanes_of<A>(first, channels);
      A* earlier = kept ? state + first * channel_stride : nullptr;
      const V latest = load(x + first, lanes);
      const A* tap = weight + first * taps + taps - 1;
      V sum = bias ? load(bias + first, lanes) : V{};
      sum = fma(latest, strided(tap, taps, lanes), sum);
      for (int64_t back = 1; back < taps; back++) {
        const V before = strided(earlier + (kept - back) * tap_stride, channel_stride, lanes);
        sum = fma(before, strided(tap - back, taps, lanes), sum);
      }
      store(to + first, SILU ? silu<A>(sum) : sum, lanes);
      for (int64_t i = 0; i < kept; i++) {
        const A* next = earlier + (i + 1) * tap_stride;
        const V moved = i + 1 < kept ? strided(next, channel_stride, lanes) : latest;
        put_strided(earlier + i * tap_stride, channel_stride, moved, lanes);
      }
    }
  }

 private:
  static V strided(const A* from, int64_t stride, int lanes) {
    if (stride == 1) return load(from, lanes);
    A part[width] = {};
    for (int lane = 0; lane < lanes; lane++) part[lane] = from[lane * stride];
    return load(part);
  }
  static void put_strided(A* to, int64_t stride, V v, int lanes) {
    if (stride == 1) return store(to, v, lanes);
    A part[width];
    store(part, v);
    for (int lane = 0; lane < lanes; lane++) to[lane * stride] = part[lane];
  }
};

// `count` rows, `stride` numbers apart, times a weight (columns, depth), plus a bias or null, to rows `of_to` apart.
template <class A> struct RowProduct {
  int64_t count, stride, of_to, columns, depth;
  const A *rows, *weight, *bias;
  A* to;
};

// In the order of whole sequences: the lanes of some columns get the numbers of squares of the weight that are transposed in
// registers.
template <class A> void multiply_in_order(const RowProduct<A>& p) {
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width;
  in_vectors<A>(p.columns, [&](int64_t column, int lanes) {
    const V start = p.bias ? load(p.bias + column, lanes) : V{};
    for (int64_t row = 0; row < p.count; row++) {
      V sum = {};
      const auto add = [&]<bool WHOLE>(int64_t k, int here) {
        const A *x = p.rows + row * p.stride + k, *weight = p.weight + column * p.depth + k;
        V square[width] = {};
#pragma GCC unroll 16
        for (int lane = 0; lane < (WHOLE ? width : lanes); lane++) square[lane] = load(weight + lane * p.depth, WHOLE ? width : here);
        transpose<A>(square);
#pragma GCC unroll 16
        for (int i = 0; i < (WHOLE ? width : here); i++) sum = fma(square[i], splat_at(x + i), sum);
      };
      in_vectors<A>(p.depth, [&](int64_t k, int here) {
        lanes == width && here == width ? add.template operator()<true>(k, here) : add.template operator()<false>(k, here);
      });
      store(p.to + row * p.of_to + column, p.bias ? sum + start : sum, lanes);
    }
  });
}

template <class A> class MambaStep {
 public:
  using V = Vec<A>;

  explicit MambaStep(const raglane_mamba_step& call) : c_(call) {}

  int32_t run() {
    const int64_t channels = c_.channels, of_parts = c_.rank + 2 * c_.states;
    const int64_t each = 4 * channels + of_parts + (c_.norm ? c_.inputs : 0);
    Scratch<A> memory;
    if (!memory.reserve(c_.rows * each, c_.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
    both_ = memory.get();
    inner_ = both_ + 2 * channels * c_.rows;
    dt_ = inner_ + channels * c_.rows;
    parts_ = dt_ + channels * c_.rows;
    const A* x = (const A*)c_.x;
    if (c_.norm) {
      A* normed = parts_ + of_parts * c_.rows;
      for (int64_t row = 0; row < c_.rows; row++)
        normalise(normed + row * c_.inputs, x + row * c_.inputs, c_.norm, c_.inputs, c_.inputs, c_.norm_eps);
      x = normed;
    }
    multiply(x, c_.inputs, c_.in_weight, c_.in_bias, both_, 2 * channels, c_.inputs);
    const Window<A> window{channels, c_.taps, c_.kept, c_.channel_stride, c_.tap_stride, (const A*)c_.conv_weight,
                           (const A*)c_.conv_bias};
    for (int64_t row = 0; row < c_.rows; row++)
      window.advance(inner_ + row * channels, both_ + row * 2 * channels, (A*)c_.earlier + row * c_.row_stride);
    multiply(inner_, channels, c_.x_weight, nullptr, parts_, of_parts, channels);
    for (int64_t row = 0; c_.eps >= 0 && row < c_.rows; row++) {
      A* part = parts_ + row * of_parts;
      const void* norms[] = {c_.dt_norm, c_.B_norm, c_.C_norm};
      const int64_t sizes[] = {c_.rank, c_.states, c_.states};
      for (int i = 0; i < 3; part += sizes[i++]) normalise(part, part, norms[i], sizes[i], sizes[i], c_.eps);
    }
    multiply(parts_, of_parts, c_.dt_weight, nullptr, dt_, channels, c_.rank);
    for (int64_t row = 0; row < c_.rows; row++)
      for (int64_t first = 0; first < channels; first += width) scan(row, first);
    multiply(inner_, channels, c_.out_weight, c_.out_bias, (A*)c_.output, c_.outputs, channels);
    for (int64_t i = 0; c_.residual && i < c_.rows * c_.outputs; i++) ((A*)c_.output)[i] += ((const A*)c_.x)[i];
    return RAGLANE_OK;
  }

 private:
  static constexpr int width = Lanes<A>::width;
  static constexpr int together = registers == 32 ? 8 : 4;  // outputs of a product

  const raglane_mamba_step& c_;
  A *both_ = nullptr, *inner_ = nullptr, *dt_ = nullptr, *parts_ = nullptr;

  void multiply(const A* rows, int64_t stride, const void* weight, const void* bias, A* to, int64_t columns,
                int64_t depth) const {
    const RowProduct<A> product{c_.rows, stride, columns, columns, depth, rows, (const A*)weight, (const A*)bias, to};
    if (c_.ordered) return multiply_in_order(product);
    const auto one = [&]<int N>(int64_t column) {
      int64_t row = 0;
      for (; row + 2 <= c_.rows; row += 2) multiply_tile<2, N>(product, row, column);
      if (row < c_.rows) multiply_tile<1, N>(product, row, column);
    };
    int64_t column = 0;
    for (; column + together <= columns; column += together) one.template operator()<together>(column);
    for (; column < columns; column++) one.template operator()<1>(column);
  }

  // Two rows or one times N rows of the weight.
  template <int ROWS, int N> static void multiply_tile(const RowProduct<A>& p, int64_t row, int64_t column) {
    V sums[ROWS][N] = {};
    const A *rows = p.rows + row * p.stride, *weight = p.weight + column * p.depth;
    const int64_t stride = p.stride, depth = p.depth;
    for (int64_t k = 0; k < depth; k += width) {
      const int count = lanes_of<A>(k, depth);
      V x[ROWS];
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; r++) x[r] = load(rows + r * stride + k, count);
      RAGLANE_EACH {
        const V w = load(weight + i * depth + k, count);
        fetch<A>(weight + N * depth, k * N + i * width);  // of the next rows
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; r++) sums[r][i] = fma(w, x[r], sums[r][i]);
      }
    }
    A* to = p.to + row * p.of_to + column;
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < N; i++) to[r * p.of_to + i] = sum_of(sums[r][i]) + (p.bias ? p.bias[column + i] : 0);
  }

  // The scan of some channels of a row, and the gate of its output.
  void scan(int64_t row, int64_t first) const {
    const int64_t channels = c_.channels, states = c_.states;
    const int lanes = lanes_of<A>(first, channels);
    const A *B = parts_ + row * (c_.rank + 2 * states) + c_.rank, *C = B + states;
    A* inner = inner_ + row * channels + first;
    const V x = load(inner, lanes), bias = c_.dt_bias ? load((const A*)c_.dt_bias + first, lanes) : V{};
    const V d = softplus<A>(load(dt_ + row * channels + first, lanes) + bias), in = d * x;
    V y = c_.D ? load((const A*)c_.D + first, lanes) * x : V{};
    A of_d[width], of_in[width];
    store(of_d, d), store(of_in, in);
    for (int64_t s = 0; s < states; s += width) {
      const int count = lanes_of<A>(s, states);
      const V of_b = load(B + s, count);
      V square[width] = {};
      constexpr int N = 4;
      for (int begin = 0; begin < lanes; begin += N) {
        V decay[N];
        const int64_t at = (first + begin) * states + s;
        A* h = (A*)c_.state + row * channels * states + at;
        const int here = lanes - begin < N ? lanes - begin : N;
        RAGLANE_EACH decay[i] = i < here ? load((const A*)c_.A + at + i * states, count) : V{};
        if (c_.logarithms) {
          exp<A, N>(decay);
          RAGLANE_EACH decay[i] = -decay[i];
        }
        V steps[N];
        Rate<A> rate[N];
        RAGLANE_EACH steps[i] = splat<V>(i < here ? of_d[begin + i] : 0), rate[i] = rate_of<A>(decay[i]);
        decays<A, N>(decay, steps, rate);
        for (int i = 0; i < here; i++) {
          const V next = fma(splat<V>(of_in[begin + i]), of_b, decay[i] * load(h + i * states, count));
          store(h + i * states, next, count);
          square[begin + i] = next;
        }
      }
      transpose<A>(square);
      for (int j = 0; j < count; j++) y = fma(square[j], splat_at(C + s + j), y);
    }
    store(inner, y * silu<A>(load(both_ + row * 2 * channels + channels + first, lanes)), lanes);
  }
};

// Of linear attention, between its projections.
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
      for (int64_t g = 0; c_.unit && g < 2 * c_.key_heads; g++) {
        A* head = inner_ + first[g % 2] + g / 2 * c_.key_size;
        normalise(head, head, nullptr, c_.key_size, 1, 1e-6);
      }
      set_gates(row);
      for (int64_t head = 0; head < c_.heads; head++) attend(row, head);
      finish(row);
    }
    return RAGLANE_OK;
  }

 private:
  const raglane_attention_step& c_;
  A *gains_ = nullptr, *decays_ = nullptr, *inner_ = nullptr;

  A* output(int64_t row) const { return (A*)c_.output + row * c_.heads * c_.value_size; }

  void set_gates(int64_t row) const {
    in_vectors<A>(c_.heads, [&](int64_t h, int lanes) {
      V d = load((const A*)c_.dt + row * c_.dt_stride + h, lanes) + load((const A*)c_.dt_bias + h, lanes);
      d = at_most((A)c_.most_dt, at_least((A)c_.least_dt, softplus<A>(d)));
      V rate = load((const A*)c_.A + h, lanes);
      exp<A, 1>(&rate);
      V decay = -d * rate;
      exp<A, 1>(&decay);
      store(decays_ + h, decay);
      const V gain = c_.beta ? (A)c_.beta_scale * sigmoid<A>(load((const A*)c_.beta + row * c_.beta_stride + h, lanes)) : d;
      store(gains_ + h, gain);
    });
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
        in_vectors<A>(keys, [&](int64_t i, int lanes) {
          A* at = state + j * keys + i;
          const V next = fma(written, load(k + i, lanes), decay * load(at, lanes));
          store(at, next, lanes);
          sum = fma(next, load(q + i, lanes), sum);
        });
        o[j] = scale * sum_of(sum) + skip * v[j];
      }
      return;
    }
    in_vectors<A>(values, [&](int64_t j, int lanes) {
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
    });
  }

  // The gate and the norm of groups of columns, in the order of the block.
  void finish(int64_t row) const {
    const int64_t columns = c_.heads * c_.value_size, size = columns / c_.norm_groups;
    const A* gate = (const A*)c_.gate + row * c_.gate_stride;
    A* o = output(row);
    if (c_.gates_first) multiply_by_gate(o, gate, columns);
    for (int64_t first = 0; first < columns; first += size)
      normalise(o + first, o + first, (const A*)c_.norm + first % c_.norm_size, size, size, c_.norm_eps);
    if (!c_.gates_first) multiply_by_gate(o, gate, columns);
  }
  static void multiply_by_gate(A* o, const A* gate, int64_t columns) {
    in_vectors<A>(columns, [&](int64_t i, int lanes) {
      store(o + i, load(o + i, lanes) * silu<A>(load(gate + i, lanes)), lanes);
    });
  }
};

}  // namespace raglane::RAGLANE_TARGET
