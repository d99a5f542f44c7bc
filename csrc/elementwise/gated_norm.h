// The norm of each head of a row, times a weight and a gate, and its gradients; abi/channels.h has the equations. The gradient of the
// weight is the sum of those of parts of the rows, so that no bit depends on the threads.
#pragma once

#include "recurrence/tasks.h"

namespace raglane::RAGLANE_TARGET {

template <class A> class GatedNorm {
 public:
  using V = Vec<A>;

  explicit GatedNorm(const raglane_gated_norm& call) : c_(call), columns_(call.heads * call.size) {}

  int32_t run() const {
    const int64_t parts = (c_.elements + part_rows - 1) / part_rows;
    Scratch<A> sums;
    if (!sums.reserve(c_.grad ? parts * columns_ : 0, c_.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
    on_threads((int)c_.threads, [&](int thread, int threads) {
      for (int64_t part = parts * thread / threads; part < parts * (thread + 1) / threads; part++) {
        A* of_weight = sums.get() + part * columns_;
        if (c_.grad) memset((void*)of_weight, 0, columns_ * sizeof(A));
        const int64_t end = (part + 1) * part_rows < c_.elements ? (part + 1) * part_rows : c_.elements;
        for (int64_t row = part * part_rows; row < end; row++)
          for (int64_t column = 0; column < columns_; column += c_.size)
            c_.grad ? retreat(row * columns_ + column, column, of_weight + column) : advance(row * columns_ + column, column);
      }
    });
    if (!c_.grad) return RAGLANE_OK;
    if (parts == 0) memset(c_.grad_weight, 0, columns_ * sizeof(A));
    else write_sum((A*)c_.grad_weight, sums.get(), columns_, parts, columns_);
    return RAGLANE_OK;
  }

 private:
  static constexpr int64_t part_rows = 128;
  const raglane_gated_norm& c_;
  const int64_t columns_;

  // What a head is multiplied by after its mean is subtracted.
  struct Norm {
    V mean, inverse;
    V operator()(V y) const { return (y - mean) * inverse; }
  };
  Norm norm_of(const A* y) const {
    V sum{}, squares{};
    if (c_.centred) in_vectors<A>(c_.size, [&](int64_t i, int lanes) { sum = sum + load(y + i, lanes); });
    const V mean = splat<V>(sum_of(sum) / (A)c_.size);
    in_vectors<A>(c_.size, [&](int64_t i, int lanes) {
      A ones[Lanes<A>::width];
      store(ones, splat<V>((A)1));
      const V centred = (load(y + i, lanes) - mean) * load(ones, lanes);
      squares = fma(centred, centred, squares);
    });
    return {mean, splat<V>((A)1) / square_root(splat<V>(sum_of(squares) / (A)c_.size + (A)c_.eps))};
  }

  // The factor of a gate, and its derivative.
  struct Gate {
    V factor, slope;
  };
  Gate gate_of(V x) const {
    const V open = sigmoid<A>(x), slope = open - open * open;
    return c_.silu ? Gate{x * open, fma(x, slope, open)} : Gate{open, slope};
  }

  // A head at `at`, whose weights begin at `column`.
  void advance(int64_t at, int64_t column) const {
    const A *y = (const A*)c_.y + at, *gate = (const A*)c_.gate + at, *weight = (const A*)c_.weight + column;
    A* output = (A*)c_.output + at;
    const Norm norm = norm_of(y);
    in_vectors<A>(c_.size, [&](int64_t i, int lanes) {
      store(output + i, norm(load(y + i, lanes)) * load(weight + i, lanes) * gate_of(load(gate + i, lanes)).factor, lanes);
    });
  }

  // The same backward; adds to the gradient of the weights.
  void retreat(int64_t at, int64_t column, A* of_weight) const {
    const A *y = (const A*)c_.y + at, *gate = (const A*)c_.gate + at, *weight = (const A*)c_.weight + column;
    const A* grad = (const A*)c_.grad + at;
    A *of_y = (A*)c_.grad_y + at, *of_gate = (A*)c_.grad_gate + at;
    const Norm norm = norm_of(y);
    V sum{}, along{};
    in_vectors<A>(c_.size, [&](int64_t i, int lanes) {
      const Gate of = gate_of(load(gate + i, lanes));
      const V unit = norm(load(y + i, lanes)), upstream = load(grad + i, lanes), passed = upstream * of.factor;
      const V its_weight = load(weight + i, lanes), of_unit = passed * its_weight, product = of_unit * unit;
      store(of_weight + i, fma(passed, unit, load(of_weight + i, lanes)), lanes);
      store(of_gate + i, upstream * unit * its_weight * of.slope, lanes);
      store(of_y + i, of_unit, lanes);
      sum = sum + of_unit, along = along + product;
    });
    const V mean = splat<V>(c_.centred ? sum_of(sum) / (A)c_.size : 0), slope = splat<V>(sum_of(along) / (A)c_.size);
    in_vectors<A>(c_.size, [&](int64_t i, int lanes) {
      const V unit = norm(load(y + i, lanes));
      store(of_y + i, norm.inverse * (load(of_y + i, lanes) - mean - unit * slope), lanes);
    });
  }
};

}  // namespace raglane::RAGLANE_TARGET
