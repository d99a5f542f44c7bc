// One step of Mamba's block for a few sequences, and what steps of other blocks share; recurrences.h has the equations.
//
// Weights are read once, as they are: a sum of a product is that of its lanes, which does not depend on other rows; or it
// has the order of other kernels, so that a step has the bits of a whole sequence. In the scan lanes are states, which are
// read and written in place.
#pragma once

#include "gemm/gemm.h"
#include "recurrence/selective.h"

namespace raglane::RAGLANE_TARGET {

template <class A> RAGLANE_INLINE int lanes_of(int64_t first, int64_t end) {
  return (int)(end - first < Lanes<A>::width ? end - first : Lanes<A>::width);
}
template <class A> RAGLANE_INLINE Vec<A> silu(Vec<A> x) { return x * sigmoid<A>(x); }

// Divide a row by the root of its mean square, times a weight if there is one.
template <class A> void normalise(A* to, const A* from, const A* weight, int64_t count, A eps) {
  using V = Vec<A>;
  V squares = {};
  for (int64_t i = 0; i < count; i += Lanes<A>::width) {
    const V x = load(from + i, lanes_of<A>(i, count));
    squares = fma(x, x, squares);
  }
  const V root = square_root(splat<V>(sum_of(squares) / (A)count + eps));
  for (int64_t i = 0; i < count; i += Lanes<A>::width) {
    const int lanes = lanes_of<A>(i, count);
    const V x = load(from + i, lanes) / root;
    store(to + i, weight ? x * load(weight + i, lanes) : x, lanes);
  }
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

// Rows, `stride` numbers apart, times a weight (columns, depth), in the order of whole sequences, to rows `of_to` apart: the
// lanes of some columns get the numbers of squares of the weight that are transposed in registers.
template <class A>
void multiply_in_order(int64_t count, const A* rows, int64_t stride, const A* weight, const A* bias, A* to, int64_t of_to,
                       int64_t columns, int64_t depth) {
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width;
  for (int64_t column = 0; column < columns; column += width) {
    const int lanes = lanes_of<A>(column, columns);
    const V start = bias ? load(bias + column, lanes) : V{};
    for (int64_t row = 0; row < count; row++) {
      V sum = {};
      for (int64_t k = 0; k < depth; k += width) {
        const int here = lanes_of<A>(k, depth);
        V square[width] = {};
        if (lanes == width && here == width) {
#pragma GCC unroll 16
          for (int lane = 0; lane < width; lane++) square[lane] = load(weight + (column + lane) * depth + k);
        } else {
          for (int lane = 0; lane < lanes; lane++) square[lane] = load(weight + (column + lane) * depth + k, here);
        }
        transpose<A>(square);
        const A* x = rows + row * stride + k;
        if (here == width) {
#pragma GCC unroll 16
          for (int i = 0; i < width; i++) sum = fma(square[i], splat_at(x + i), sum);
        } else {
          for (int i = 0; i < here; i++) sum = fma(square[i], splat_at(x + i), sum);
        }
      }
      store(to + row * of_to + column, bias ? sum + start : sum, lanes);
    }
  }
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
        normalise<A>(normed + row * c_.inputs, x + row * c_.inputs, (const A*)c_.norm, c_.inputs, (A)c_.norm_eps);
      x = normed;
    }
    multiply(x, c_.inputs, c_.in_weight, c_.in_bias, both_, 2 * channels, c_.inputs);
    const Window<A> window{channels, c_.taps, c_.kept, c_.channel_stride, c_.tap_stride, (const A*)c_.conv_weight,
                           (const A*)c_.conv_bias};
    for (int64_t row = 0; row < c_.rows; row++)
      window.advance(inner_ + row * channels, both_ + row * 2 * channels, (A*)c_.earlier + row * c_.row_stride);
    multiply(inner_, channels, c_.x_weight, nullptr, parts_, of_parts, channels);
    if (c_.eps >= 0) {
      for (int64_t row = 0; row < c_.rows; row++) {
        A* part = parts_ + row * of_parts;
        const void* norms[] = {c_.dt_norm, c_.B_norm, c_.C_norm};
        const int64_t sizes[] = {c_.rank, c_.states, c_.states};
        for (int i = 0; i < 3; part += sizes[i++]) normalise<A>(part, part, (const A*)norms[i], sizes[i], (A)c_.eps);
      }
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

  template <int N> struct Number {
    static constexpr int value = N;
  };

  // Rows, `stride` numbers apart, times a weight (columns, depth).
  void multiply(const A* rows, int64_t stride, const void* weight, const void* bias, A* to, int64_t columns,
                int64_t depth) const {
    const auto one = [&](auto outputs, int64_t column) {
      constexpr int N = decltype(outputs)::value;
      const Product product{rows, (const A*)weight + column * depth, bias ? (const A*)bias + column : nullptr,
                            to + column, stride, columns, depth};
      int64_t row = 0;
      for (; row + 2 <= c_.rows; row += 2) multiply_tile<2, N>(product, row);
      if (row < c_.rows) multiply_tile<1, N>(product, row);
    };
    int64_t column = 0;
    if (c_.ordered) {
      multiply_in_order<A>(c_.rows, rows, stride, (const A*)weight, (const A*)bias, to, columns, columns, depth);
      return;
    }
    for (; column + together <= columns; column += together) one(Number<together>{}, column);
    for (; column < columns; column++) one(Number<1>{}, column);
  }

  struct Product {
    const A *rows, *weight, *bias;
    A* to;
    int64_t stride, columns, depth;
  };

  // Two rows or one times N rows of the weight.
  template <int ROWS, int N> static void multiply_tile(const Product& p, int64_t row) {
    V sums[ROWS][N] = {};
    const A* rows = p.rows + row * p.stride;
    for (int64_t k = 0; k < p.depth; k += width) {
      const int count = lanes_of<A>(k, p.depth);
      V x[ROWS];
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; r++) x[r] = load(rows + r * p.stride + k, count);
      RAGLANE_EACH {
        const V w = load(p.weight + i * p.depth + k, count);
        fetch<A>(p.weight + N * p.depth, k * N + i * width);  // of the next rows
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; r++) sums[r][i] = fma(w, x[r], sums[r][i]);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < N; i++) p.to[(row + r) * p.columns + i] = sum_of(sums[r][i]) + (p.bias ? p.bias[i] : 0);
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

}  // namespace raglane::RAGLANE_TARGET
