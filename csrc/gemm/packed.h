// The packed weights of a forward loop, from the call itself, or from an earlier one and kept by the caller.
#pragma once

#include "abi/call.h"
#include "cells/table.h"
#include "gemm/products.h"

namespace raglane::RAGLANE_TARGET {

// Weights packed in scratch, unless the caller passes packed ones. `Own` is one of the classes below.
template <class Own, class Cell, class S> class PackedWeights {
 public:
  using A = typename Arithmetic<S>::type;
  InputProducts<Cell, S> input;

  explicit PackedWeights(const raglane_layer& layer)
      : input(layer.values, layer.hidden_size, layer.input_size), l_(layer) {}

  // Reals of all directions.
  int64_t size() const { return l_.directions * own().direction_size(); }
  void place(A* memory) {
    for (int d = 0; d < l_.directions; d++) own().place(d, memory + d * own().direction_size());
  }
  bool reserve(bool poison) {
    if (!l_.packed && !scratch_.reserve(size(), poison)) return false;
    // pack() does not write to weights of the caller.
    place(l_.packed ? (A*)((unsigned char*)l_.packed + sizeof(PackedHeader)) : scratch_.get());
    return true;
  }
  // The part of one thread.
  void pack(int thread, int threads) {
    for (int d = 0; !l_.packed && d < l_.directions; d++) own().pack(d, thread, threads);
  }

 protected:
  const raglane_layer& l_;

 private:
  Scratch<A> scratch_;
  Own& own() { return static_cast<Own&>(*this); }
  const Own& own() const { return static_cast<const Own&>(*this); }
};

// Of a cell with a matrix product of its state.
template <class Cell, class S> class MatrixWeights : public PackedWeights<MatrixWeights<Cell, S>, Cell, S> {
  using Base = PackedWeights<MatrixWeights<Cell, S>, Cell, S>;
  using Base::l_;

 public:
  using typename Base::A;
  using Base::input;
  Panels<S> hidden[2], projection[2];

  explicit MatrixWeights(const raglane_layer& layer) : Base(layer) {
    int64_t H = l_.hidden_size, P = l_.projection_size ? l_.projection_size : H;
    for (int d = 0; d < 2; d++) {
      hidden[d] = {nullptr, H, P, Cell::gates, Cell::unit_vectors};
      projection[d] = {nullptr, P, H, 1, panel_vectors};
    }
  }

  int64_t direction_size() const {
    return hidden[0].size() + (l_.projection_size ? projection[0].size() : 0) + input.size();
  }
  using Base::place;
  void place(int d, A* memory) {
    hidden[d].data = memory;
    projection[d].data = memory + hidden[d].size();
    input.place(d, memory + direction_size() - input.size());
  }
  using Base::pack;
  void pack(int d, int thread, int threads) {
    const raglane_weights& w = l_.weights[d];
    int64_t H = l_.hidden_size, P = l_.projection_size ? l_.projection_size : H;
    const S *of_input[Cell::gates], *of_hidden[Cell::gates], *of_projection = (const S*)w.projection;
    for (int gate = 0; gate < Cell::gates; gate++) {
      of_input[gate] = (const S*)w.input + gate * H * l_.input_size;
      of_hidden[gate] = (const S*)w.hidden + gate * H * P;
    }
    for (int64_t panel = thread; panel < hidden[d].count(); panel += threads) {
      input.pack(d, panel, of_input);
      hidden[d].pack_transposed(of_hidden, panel);
      for (int gate = 0; gate < Cell::gates; gate++) {
        if (w.input_bias) input.add_bias(d, panel, gate, (const S*)w.input_bias + gate * H);
        if (w.hidden_bias) input.add_bias(d, panel, Cell::hidden_slot(gate), (const S*)w.hidden_bias + gate * H);
      }
    }
    if (l_.projection_size)
      for (int64_t panel = thread; panel < projection[d].count(); panel += threads)
        projection[d].pack_transposed(&of_projection, panel);
  }
};

// Of an element-wise cell.
template <class Cell, class S> class ElementwiseWeights : public PackedWeights<ElementwiseWeights<Cell, S>, Cell, S> {
  using Base = PackedWeights<ElementwiseWeights<Cell, S>, Cell, S>;
  using Base::l_;

 public:
  using typename Base::A;
  using Base::input;
  A* recurrent[2] = {};  // factor after factor, each of `padded` reals
  const int64_t padded;

  explicit ElementwiseWeights(const raglane_layer& layer) : Base(layer), padded(input.panels(0).padded_columns()) {}

  int64_t direction_size() const { return input.size() + Cell::recurrent * padded; }
  using Base::place;
  void place(int d, A* memory) {
    input.place(d, memory);
    recurrent[d] = memory + input.size();
  }
  using Base::pack;
  void pack(int d, int thread, int threads) {
    const raglane_weights& w = l_.weights[d];
    const int64_t H = l_.hidden_size;
    const S* gates[Cell::gates];
    for (int gate = 0; gate < Cell::gates; gate++) gates[gate] = (const S*)w.input + gate * H * l_.input_size;
    if (Cell::gates > cell_table[l_.cell].gates) gates[Cell::gates - 1] = (const S*)w.skip;
    for (int64_t panel = thread; panel < input.panels(0).count(); panel += threads) {
      input.pack(d, panel, gates);
      for (int i = 0; w.input_bias && i < Cell::biases; i++)
        input.add_bias(d, panel, Cell::first_bias + i, (const S*)w.input_bias + i * H);
    }
    for (int i = thread; i < Cell::recurrent; i += threads)
      copy_columns(recurrent[d] + i * padded, (const S*)w.hidden + i * H, 0, H);
  }
};

// Pack weights for later calls, into the caller's memory after an existing header.
template <class Weights, class C> class Packing {
 public:
  explicit Packing(const C& call) : call_(call), weights_(*call.layer) {}

  bool reserve() {
    *call_.packing.bytes = (int64_t)sizeof(PackedHeader) + weights_.size() * (int64_t)sizeof(typename Weights::A);
    unsigned char* to = (unsigned char*)call_.packing.to;
    if (to) weights_.place((typename Weights::A*)(to + sizeof(PackedHeader)));
    return true;
  }
  void work(int thread, int threads) {
    if (call_.packing.to) weights_.pack(thread, threads);
  }

 private:
  const C& call_;
  Weights weights_;
};

template <class Cell, class S> using MatrixPacking = Packing<MatrixWeights<Cell, S>, Call>;
template <class Cell, class S> using ElementwisePacking = Packing<ElementwiseWeights<Cell, S>, ElementwiseCall>;

}  // namespace raglane::RAGLANE_TARGET
