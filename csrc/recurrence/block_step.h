// One step of a block, operation by operation; recurrences.h has their equations.
#pragma once

#include "elementwise/channels.h"
#include "recurrence/attention_forward.h"
#include "recurrence/step.h"

namespace raglane::RAGLANE_TARGET {

template <class A> class BlockStep {
 public:
  using V = Vec<A>;

  explicit BlockStep(const raglane_block_step& call) : c_(call) {}

  int32_t run() {
    Scratch<A> memory;
    if (!memory.reserve(c_.rows * c_.columns, c_.flags & RAGLANE_POISON)) return RAGLANE_OUT_OF_MEMORY;
    table_ = memory.get();
    for (int64_t row = 0; row < c_.rows; row++)
      memcpy((void*)at(row, 0), (const A*)c_.x + row * c_.inputs, c_.inputs * sizeof(A));
    for (int64_t i = 0; i < c_.operations; i++) {
      const int32_t status = apply(c_.list[i]);
      if (status != RAGLANE_OK) return status;
    }
    for (int64_t row = 0; row < c_.rows; row++)
      memcpy((void*)((A*)c_.output + row * c_.outputs), at(row, c_.first), c_.outputs * sizeof(A));
    return RAGLANE_OK;
  }

 private:
  using Operation = raglane_row_operation;

  const raglane_block_step& c_;
  A* table_ = nullptr;

  A* at(int64_t row, int64_t column) const { return table_ + row * c_.columns + column; }

  int32_t apply(const Operation& o) const {
    if (o.kind == RAGLANE_ROW_PRODUCT) multiply(o);
    for (int64_t row = 0; row < c_.rows; row++) {
      switch (o.kind) {
        case RAGLANE_ROW_CONVOLVE: convolve(o, row); break;
        case RAGLANE_ROW_FUNCTION: map(o, row); break;
        case RAGLANE_ROW_ADD: combine(o, row, [](V x, V y) { return x + y; }); break;
        case RAGLANE_ROW_MULTIPLY: combine(o, row, [](V x, V y) { return x * y; }); break;
        case RAGLANE_ROW_NORM: normalise_parts(o, row); break;
        case RAGLANE_ROW_DECAY: decay(o, row); break;
        case RAGLANE_ROW_ATTEND: {
          const int32_t status = attend(o, row);
          if (status != RAGLANE_OK) return status;
        }
      }
    }
    return RAGLANE_OK;
  }

  void multiply(const Operation& o) const {
    const int64_t columns = o.count / o.parts;
    for (int64_t part = 0; part < o.parts; part++) {
      const A* weight = (const A*)o.weight + part * columns * o.size;
      const A* bias = o.bias ? (const A*)o.bias + part * columns : nullptr;
      const RowProduct<A> product{c_.rows, c_.columns, c_.columns, columns, o.size, at(0, o.a + part * o.size),
                                  weight, bias, at(0, o.to + part * columns)};
      o.option ? multiply_across(product) : multiply_in_order(product);
    }
  }
  // The weight is (depth, columns).
  static void multiply_across(const RowProduct<A>& p) {
    for (int64_t row = 0; row < p.count; row++) {
      const A* x = p.rows + row * p.stride;
      in_vectors<A>(p.columns, [&](int64_t column, int lanes) {
        V sum = {};
        for (int64_t k = 0; k < p.depth; k++) sum = fma(load(p.weight + k * p.columns + column, lanes), splat_at(x + k), sum);
        store(p.to + row * p.of_to + column, p.bias ? sum + load(p.bias + column, lanes) : sum, lanes);
      });
    }
  }

  void convolve(const Operation& o, int64_t row) const {
    const int64_t kept = o.size - 1, numbers = kept * o.count;
    A* state = (A*)o.next + row * numbers;
    if (numbers > 0) memcpy((void*)state, (const A*)o.state + row * numbers, numbers * sizeof(A));
    const Window<A> window{o.count, o.size, kept, 1, o.count, (const A*)o.weight, (const A*)o.bias};
    window.template advance<false>(at(row, o.to), at(row, o.a), state);
  }

  static V function(const Operation& o, V x) {
    switch (o.option) {
      case RAGLANE_ROW_SIGMOID: return sigmoid<A>(x);
      case RAGLANE_ROW_SILU: return silu<A>(x);
      case RAGLANE_ROW_GELU: return gelu<A>(x);
      case RAGLANE_ROW_SOFTPLUS: return softplus<A>(x);
      case RAGLANE_ROW_LOG_SIGMOID: return -softplus<A>(-x);
      case RAGLANE_ROW_CLAMP: return at_most((A)o.high, at_least((A)o.low, x));
      default: return (A)o.high * tanh<A>(x / splat<V>((A)o.high));
    }
  }
  void map(const Operation& o, int64_t row) const {
    in_vectors<A>(o.count, [&](int64_t i, int lanes) {
      store(at(row, o.to) + i, function(o, load(at(row, o.a) + i, lanes)), lanes);
    });
  }

  template <class Function> void combine(const Operation& o, int64_t row, Function&& function) const {
    const int64_t period = o.weight ? o.size : o.count;
    for (int64_t first = 0; first < o.count; first += period) {
      const A *x = at(row, o.a) + first, *y = o.weight ? (const A*)o.weight : at(row, o.b);
      in_vectors<A>(period, [&](int64_t i, int lanes) {
        store(at(row, o.to) + first + i, function(load(x + i, lanes), load(y + i, lanes)), lanes);
      });
    }
  }

  // Sums are in the order of columns, as those of products.
  void normalise_parts(const Operation& o, int64_t row) const {
    const bool is_centred = o.option == 2;
    for (int64_t part = 0; part < o.parts; part++) {
      const A* x = at(row, o.a) + part * o.size;
      A sum = 0;
      for (int64_t i = 0; i < o.size; i++) sum += is_centred ? x[i] : x[i] * x[i];
      const A mean = o.option == 1 ? sum : sum / (A)o.size;
      const V root = is_centred ? V{} : square_root(splat<V>(mean + (A)o.low));
      in_vectors<A>(o.size, [&](int64_t i, int lanes) {
        const V value = load(x + i, lanes);
        store(at(row, o.to) + part * o.size + i, is_centred ? value - mean : value / root, lanes);
      });
    }
  }

  int32_t attend(const Operation& o, int64_t row) const {
    static constexpr int64_t offsets[] = {0, 1}, order[] = {0};
    const int64_t keys = o.extent * o.size, numbers = o.count * o.size;
    raglane_attention call{};
    call.flags = c_.flags, call.threads = 1, call.sequences = 1, call.elements = 1;
    call.key_heads = o.parts, call.heads = o.extent, call.key_size = o.size, call.value_size = o.count / o.extent;
    call.delta = o.option == 1, call.scale = o.low, call.eps = o.high, call.offsets = offsets;
    call.q = at(row, o.a), call.k = at(row, o.b), call.v = at(row, o.c), call.log_decay = at(row, o.d);
    call.initial = (const A*)o.state + row * numbers, call.final = (A*)o.next + row * numbers;
    call.output = at(row, o.to);
    if (o.option != 2) {
      call.gain = at(row, o.e);
    } else {
      call.log_gain = at(row, o.e);
      call.initial_normaliser = (const A*)o.second + row * keys, call.final_normaliser = (A*)o.next_second + row * keys;
      call.initial_stabiliser = (const A*)o.third + row * o.extent;
      call.final_stabiliser = (A*)o.next_third + row * o.extent;
    }
    return AttentionForward<A>(LinearAttention{&call, order, 1}).run();
  }

  void decay(const Operation& o, int64_t row) const {
    const V fresh = splat<V>((A)1 - ((const A*)o.second)[row]);
    ((A*)o.next_second)[row] = 1;
    in_vectors<A>(o.count, [&](int64_t i, int lanes) {
      const V d = load(at(row, o.a) + i, lanes) * load((const A*)o.weight + i, lanes);
      const GatedDecay<A> decay(&d, fresh);
      const V before = load((const A*)o.state + row * o.count + i, lanes);
      const V h = decay.advance(before, load(at(row, o.c) + i, lanes), load(at(row, o.b) + i, lanes));
      store((A*)o.next + row * o.count + i, h, lanes);
      store(at(row, o.to) + i, h, lanes);
    });
  }
};

}  // namespace raglane::RAGLANE_TARGET
