// Random steps of recurrent blocks for the driver: a row has the same bits alone as with others.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "tests/drawing.h"

struct DrawnStep {
  // An array with so many bytes per row: an input, or one that a step replaces or writes.
  struct Rows {
    Bytes bytes, before;
    int64_t each;
    bool is_result;
  };

  std::mt19937& random;
  int64_t dtype, rows;
  std::vector<Bytes> weights;
  std::vector<Rows> arrays;

  explicit DrawnStep(std::mt19937& drawn) : random(drawn), dtype(below(drawn, 2)), rows(1 + below(drawn, 5)) {
    weights.reserve(256), arrays.reserve(64);
  }

  int64_t size(int most) { return 1 + below(random, most); }
  const void* weight(int64_t count) { return weights.emplace_back(random_reals(dtype, count, random)).data(); }
  const void* maybe(int64_t count) { return below(random, 3) ? weight(count) : nullptr; }
  void* array(int64_t count, bool is_result) {
    Bytes drawn = random_reals(dtype, rows * count, random);
    return arrays.emplace_back(Rows{drawn, drawn, count * bytes_of(dtype), is_result}).bytes.data();
  }
  const void* in(int64_t count) { return array(count, false); }
  void* changed(int64_t count) { return array(count, true); }

  template <class Call> void begin(Call& call) {
    call.abi = RAGLANE_ABI, call.isa = any_isa(random), call.dtype = dtype, call.flags = RAGLANE_POISON, call.rows = rows;
  }

  // The strides of the state of a convolution, and the state.
  template <class Call> void* earlier(Call& call, int64_t channels) {
    call.taps = size(4), call.kept = call.taps - below(random, 2);
    const bool by_channel = below(random, 2);
    call.row_stride = channels * call.kept;
    call.channel_stride = by_channel ? call.kept : 1, call.tap_stride = by_channel ? 1 : channels;
    return call.kept > 0 ? changed(channels * call.kept) : nullptr;
  }

  void restore() {
    for (Rows& one : arrays) std::copy(one.before.begin(), one.before.end(), one.bytes.begin());
  }
  Bytes results(int64_t first, int64_t end) const {
    Bytes all;
    for (const Rows& one : arrays)
      if (one.is_result) all.insert(all.end(), one.bytes.begin() + first * one.each, one.bytes.begin() + end * one.each);
    return all;
  }

  // `move` adds a number of rows to the pointers of a call.
  template <class Call, class Step, class Move> void compare(Call& call, Step step, Move move) {
    const auto run = [&](const Call& one) {
      char message[256] = "";
      if (step(&one, message, sizeof message) != RAGLANE_OK)
        std::fprintf(stderr, "a step failed: %s\n", message), std::exit(1);
    };
    run(call);
    std::vector<Bytes> wanted;
    for (int64_t row = 0; row < rows; row++) wanted.push_back(results(row, row + 1));
    restore();
    for (int64_t row = 0; row < rows; row++) {
      Call alone = call;
      alone.rows = 1;
      move(alone, row);
      run(alone);
      if (results(row, row + 1) != wanted[row])
        std::fprintf(stderr, "row %d of a step has other bits alone\n", (int)row), std::exit(1);
    }
  }
  template <class T> void advance(T*& array, int64_t numbers) const {
    if (array) array = (T*)((const unsigned char*)array + numbers * bytes_of(dtype));
  }

  void check_mamba() {
    raglane_mamba_step call{};
    begin(call);
    const int64_t D = size(40), E = size(40), S = size(20), R = size(5);
    call.residual = below(random, 2), call.logarithms = below(random, 2), call.ordered = below(random, 2);
    const int64_t O = call.residual ? D : size(40);
    call.inputs = D, call.outputs = O, call.channels = E, call.states = S, call.rank = R;
    call.norm_eps = 1e-5, call.eps = below(random, 2) ? 1e-5 : -1;
    call.earlier = earlier(call, E);
    call.x = in(D), call.norm = maybe(D), call.in_weight = weight(2 * E * D), call.in_bias = maybe(2 * E);
    call.conv_weight = weight(E * call.taps), call.conv_bias = maybe(E), call.x_weight = weight((R + 2 * S) * E);
    call.dt_weight = weight(E * R), call.dt_bias = maybe(E);
    call.dt_norm = maybe(R), call.B_norm = maybe(S), call.C_norm = maybe(S);
    call.A = weight(E * S), call.D = maybe(E), call.out_weight = weight(O * E), call.out_bias = maybe(O);
    call.state = changed(E * S), call.output = changed(O);
    compare(call, raglane_step_mamba, [&](raglane_mamba_step& one, int64_t row) {
      advance(one.x, row * D), advance(one.earlier, row * E * one.kept);
      advance(one.state, row * E * S), advance(one.output, row * O);
    });
  }

  void check_attention() {
    raglane_attention_step call{};
    begin(call);
    const int64_t G = size(3), H = G * size(3), K = size(20), V = size(40), values = H * V, C = 2 * G * K + values;
    call.key_heads = G, call.heads = H, call.key_size = K, call.value_size = V;
    call.v_first = 0, call.k_first = values, call.q_first = values + G * K;
    call.unit = below(random, 2), call.delta = below(random, 2), call.gates_first = below(random, 2);
    call.transposed = !call.delta && below(random, 2);
    call.norm_groups = below(random, 2) ? H : 1, call.norm_size = call.norm_groups == 1 ? values : V;
    call.scale = 0.5, call.beta_scale = 2, call.least_dt = 0.1, call.most_dt = 2, call.norm_eps = 1e-5;
    call.earlier = earlier(call, C);
    call.mixed_stride = C, call.gate_stride = values, call.dt_stride = call.beta_stride = H;
    call.mixed = in(C), call.gate = in(values), call.dt = in(H), call.beta = below(random, 2) ? in(H) : nullptr;
    call.conv_weight = weight(C * call.taps), call.conv_bias = maybe(C), call.dt_bias = weight(H);
    call.A = weight(H), call.D = maybe(H), call.norm = weight(call.norm_size);
    call.state = changed(H * K * V), call.output = changed(values);
    compare(call, raglane_step_attention, [&](raglane_attention_step& one, int64_t row) {
      advance(one.mixed, row * C), advance(one.gate, row * values), advance(one.dt, row * H), advance(one.beta, row * H);
      advance(one.earlier, row * C * one.kept), advance(one.state, row * H * K * V), advance(one.output, row * values);
    });
  }

  // A state of a block and what an operation adds to its address per row.
  struct State {
    const void** before;
    void** after;
    int64_t count;
  };

  void check_block() {
    raglane_block_step call{};
    begin(call);
    std::vector<raglane_row_operation> list(size(8));
    call.inputs = call.columns = size(40);
    for (raglane_row_operation& o : list) draw(o, call.columns);
    call.list = list.data(), call.operations = list.size();
    call.first = list.back().to, call.outputs = list.back().count;
    call.x = in(call.inputs), call.output = changed(call.outputs);
    std::vector<raglane_row_operation> moved;
    compare(call, raglane_step_block, [&](raglane_block_step& one, int64_t row) {
      moved = list;
      for (raglane_row_operation& o : moved)
        for (const State& state : states_of(o))
          advance(*state.before, row * state.count), advance(*state.after, row * state.count);
      one.list = moved.data();
      advance(one.x, row * one.inputs), advance(one.output, row * one.outputs);
    });
  }

  static std::vector<State> states_of(raglane_row_operation& o) {
    std::vector<State> states;
    if (o.kind == RAGLANE_ROW_CONVOLVE) states.push_back({&o.state, &o.next, o.count * (o.size - 1)});
    if (o.kind == RAGLANE_ROW_DECAY) states.push_back({&o.state, &o.next, o.count}), states.push_back({&o.second, &o.next_second, 1});
    if (o.kind != RAGLANE_ROW_ATTEND) return states;
    states.push_back({&o.state, &o.next, o.count * o.size});
    if (o.option != 2) return states;
    states.push_back({&o.second, &o.next_second, o.extent * o.size});
    states.push_back({&o.third, &o.next_third, o.extent});
    return states;
  }

  // An operation on columns that have numbers, which appends its own.
  void draw(raglane_row_operation& o, int64_t& columns) {
    o = {};
    o.kind = below(random, RAGLANE_ROW_DECAY + 1);
    o.parts = o.size = o.extent = 1, o.to = columns, o.low = 0.01, o.high = 2;
    int64_t read = columns < 40 ? columns : 40;
    read = size((int)read);
    o.count = read;
    switch (o.kind) {
      case RAGLANE_ROW_PRODUCT:
        o.size = read, o.count = size(40), o.option = below(random, 2);
        if (read % 2 == 0) o.parts = 2, o.size = read / 2, o.count *= 2;
        o.weight = weight(o.count * o.size), o.bias = maybe(o.count);
        break;
      case RAGLANE_ROW_CONVOLVE: o.size = size(4), o.weight = weight(o.count * o.size), o.bias = maybe(o.count); break;
      case RAGLANE_ROW_FUNCTION: o.option = below(random, RAGLANE_ROW_CAP + 1); break;
      case RAGLANE_ROW_ADD:
      case RAGLANE_ROW_MULTIPLY:
        o.size = read % 2 ? read : read / 2;
        o.weight = maybe(o.size);
        break;
      case RAGLANE_ROW_NORM:
        o.parts = read % 3 ? 1 : 3, o.size = read / o.parts, o.option = below(random, 3);
        break;
      case RAGLANE_ROW_ATTEND:
        o.size = read, o.extent = size((int)read), o.count = o.extent * size((int)(read / o.extent)), o.option = below(random, 3);
        break;
      case RAGLANE_ROW_DECAY: o.weight = weight(o.count);
    }
    for (int64_t* first : {&o.a, &o.b, &o.c, &o.d, &o.e}) *first = columns > read ? below(random, (int)(columns - read)) : 0;
    for (const State& state : states_of(o)) {
      if (state.count < 1) continue;
      *state.before = in(state.count), *state.after = changed(state.count);
    }
    columns += o.count;
  }
};
