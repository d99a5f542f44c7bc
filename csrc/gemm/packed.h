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

// When the panels of a weight are packed: all of them before their first use; or each one just before, in memory of its
// own or, if it is used once, in room of the thread, where the next one replaces it.
enum class Packed { before, at_use, in_turn };

// Of a cell with a matrix product of its state.
template <class Cell, class S> class MatrixWeights : public PackedWeights<MatrixWeights<Cell, S>, Cell, S> {
  using Base = PackedWeights<MatrixWeights<Cell, S>, Cell, S>;
  using Base::l_;

 public:
  using typename Base::A;
  using Base::input;
  Panels<S> hidden[2], projection[2];
  Packed input_packed = Packed::before, hidden_packed = Packed::before;

  explicit MatrixWeights(const raglane_layer& layer) : Base(layer) {
    int64_t H = l_.hidden_size, P = l_.projection_size ? l_.projection_size : H;
    for (int d = 0; d < 2; d++) {
      hidden[d] = {nullptr, H, P, Cell::gates, Cell::unit_vectors};
      projection[d] = {nullptr, P, H, 1, panel_vectors};
    }
  }

  int64_t direction_size() const {
    return hidden_size() + (l_.projection_size ? projection[0].size() : 0) + input_size();
  }
  using Base::place;
  void place(int d, A* memory) {
    hidden[d].data = memory;
    projection[d].data = memory + hidden_size();
    input.place(d, memory + direction_size() - input_size(), input_packed != Packed::in_turn);
  }
  bool reserve(bool poison) {
    const bool needs_rooms = input_packed == Packed::in_turn || hidden_packed == Packed::in_turn;
    return Base::reserve(poison) && (!needs_rooms || rooms_.reserve(l_.threads * room_size(), poison));
  }

  // The weights of a direction for the products of a thread.
  Panels<S> input_of(int d, int thread) const { return of_thread(input.panels(d), input_packed, thread, 0); }
  Panels<S> hidden_of(int d, int thread) const {
    return of_thread(hidden[d], hidden_packed, thread, input.panels(0).panel_size());
  }
  void pack_input(int d, Panels<S>& to, int64_t panel) const {
    to.pack_transposed(Gates((const S*)l_.weights[d].input, l_.hidden_size * l_.input_size).of, panel);
  }
  void pack_hidden(int d, Panels<S>& to, int64_t panel) const {
    to.pack_transposed(Gates((const S*)l_.weights[d].hidden, l_.hidden_size * to.depth).of, panel);
  }

  using Base::pack;
  void pack(int d, int thread, int threads) {
    const raglane_weights& w = l_.weights[d];
    const int64_t H = l_.hidden_size;
    const S* of_projection = (const S*)w.projection;
    const Gates of_input((const S*)w.input, H * l_.input_size);
    for (int64_t panel = thread; panel < hidden[d].count(); panel += threads) {
      if (input_packed == Packed::before) input.pack(d, panel, of_input.of);
      if (hidden_packed == Packed::before) pack_hidden(d, hidden[d], panel);
      input.clear_bias(d, panel);
      for (int gate = 0; gate < Cell::gates; gate++) {
        if (w.input_bias) input.add_bias(d, panel, gate, (const S*)w.input_bias + gate * H);
        if (w.hidden_bias) input.add_bias(d, panel, Cell::hidden_slot(gate), (const S*)w.hidden_bias + gate * H);
      }
    }
    if (l_.projection_size)
      for (int64_t panel = thread; panel < projection[d].count(); panel += threads)
        projection[d].pack_transposed(&of_projection, panel);
  }

 private:
  Scratch<A> rooms_;  // of each thread, for a panel of input weights and one of hidden ones, if they are packed in turn

  // The matrices of the gates.
  struct Gates {
    const S* of[Cell::gates];
    Gates(const S* first, int64_t numbers) {
      for (int gate = 0; gate < Cell::gates; gate++) of[gate] = first + gate * numbers;
    }
  };

  int64_t hidden_size() const { return hidden_packed == Packed::in_turn ? 0 : hidden[0].size(); }
  int64_t input_size() const { return input_packed == Packed::in_turn ? input.bias_size() : input.size(); }

  int64_t room_size() const { return input.panels(0).panel_size() + hidden[0].panel_size(); }

  Panels<S> of_thread(Panels<S> panels, Packed packed, int thread, int64_t at) const {
    if (packed == Packed::in_turn) panels.data = rooms_.get() + thread * room_size() + at, panels.in_turn = true;
    return panels;
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
      input.clear_bias(d, panel);
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
