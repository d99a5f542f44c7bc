// Random linear recurrences, forward and backward, for the driver: with any number of threads they have the same bits.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "tests/drawing.h"

struct DrawnRecurrence {
  std::mt19937& random;
  int64_t dtype, sums, sequences, elements;
  std::vector<int64_t> offsets{0};
  Bytes resets;
  std::vector<Bytes> inputs, results;

  explicit DrawnRecurrence(std::mt19937& drawn) : random(drawn) {
    dtype = below(random, 3), sums = dtype == RAGLANE_BFLOAT16 ? (int64_t)RAGLANE_FLOAT32 : dtype;
    sequences = below(random, 7);
    for (int64_t b = 0; b < sequences; b++)
      offsets.push_back(offsets.back() + (below(random, 4) ? below(random, below(random, 3) ? 5 : 100) : 0));
    elements = offsets.back();
    for (int64_t i = 0; i < elements; i++) resets.push_back(below(random, 6) == 0);
    resets.shrink_to_fit();
    inputs.reserve(64), results.reserve(64);
  }

  const void* in(int64_t type, int64_t count) { return inputs.emplace_back(random_reals(type, count, random)).data(); }
  void* out(int64_t type, int64_t count) { return results.emplace_back(count * bytes_of(type)).data(); }
  const void* maybe_in(int64_t type, int64_t count) { return below(random, 3) ? in(type, count) : nullptr; }
  void* maybe_out(int64_t type, int64_t count) { return below(random, 4) ? out(type, count) : nullptr; }

  template <class Call> void begin(Call& call) {
    call.abi = RAGLANE_ABI, call.isa = any_isa(random), call.dtype = dtype, call.flags = RAGLANE_POISON;
    call.sequences = sequences, call.elements = elements, call.offsets = offsets.data();
    call.resets = below(random, 2) ? resets.data() : nullptr;
  }

  template <class Call, class Forward, class Backward> void compare(Call& call, Forward forward, Backward backward) {
    std::vector<Bytes> wanted;
    for (int64_t threads : {1, 2, 3}) {
      char message[256] = "";
      for (Bytes& bytes : results)
        if (!bytes.empty()) std::memset(bytes.data(), 0xff, bytes.size());
      call.threads = threads;
      if (forward(&call, message, sizeof message) != RAGLANE_OK || backward(&call, message, sizeof message) != RAGLANE_OK)
        std::fprintf(stderr, "a recurrence failed: %s\n", message), std::exit(1);
      if (wanted.empty()) wanted = results;
      if (results != wanted) std::fprintf(stderr, "a recurrence has other bits with %d threads\n", (int)threads), std::exit(1);
    }
  }

  void check_scan() {
    raglane_selective_scan call{};
    begin(call);
    const int64_t N = elements, G = 1 + below(random, 3), E = G * (1 + below(random, 40)), S = 1 + below(random, 20);
    call.channels = E, call.groups = G, call.states = S, call.softplus = below(random, 2);
    call.least_dt = below(random, 2) ? 0.01 : -1, call.most_dt = 1;
    call.x = in(dtype, N * E), call.dt = in(dtype, N * E), call.A = in(sums, E * S);
    call.B = in(dtype, N * G * S), call.C = in(dtype, N * G * S);
    call.D = maybe_in(sums, E), call.dt_bias = maybe_in(sums, E), call.initial = maybe_in(sums, sequences * E * S);
    call.output = out(dtype, N * E), call.final = out(sums, sequences * E * S);
    call.borders = out(sums, N / raglane_border() * E * S);
    call.grad_output = maybe_in(dtype, N * E), call.grad_final = maybe_in(sums, sequences * E * S);
    call.grad_x = maybe_out(dtype, N * E), call.grad_dt = maybe_out(dtype, N * E), call.grad_A = maybe_out(sums, E * S);
    call.grad_B = maybe_out(dtype, N * G * S), call.grad_C = maybe_out(dtype, N * G * S);
    call.grad_D = maybe_out(sums, E), call.grad_dt_bias = maybe_out(sums, E);
    call.grad_initial = maybe_out(sums, sequences * E * S);
    compare(call, raglane_scan_selectively, raglane_scan_selectively_backward);
  }

  void check_convolution() {
    raglane_convolution call{};
    begin(call);
    const int64_t N = elements, E = 1 + below(random, 200), K = 1 + below(random, 6), R = K - 1 + below(random, 3);
    call.channels = E, call.taps = K, call.kept = R, call.x = in(dtype, N * E), call.weight = in(sums, E * K);
    call.bias = maybe_in(sums, E), call.initial = maybe_in(sums, sequences * R * E);
    call.output = out(dtype, N * E), call.final = out(sums, sequences * R * E);
    call.grad_output = maybe_in(dtype, N * E), call.grad_final = maybe_in(sums, sequences * R * E);
    call.grad_x = maybe_out(dtype, N * E), call.grad_weight = maybe_out(sums, E * K), call.grad_bias = maybe_out(sums, E);
    if (call.initial) call.grad_initial = maybe_out(sums, sequences * R * E);
    compare(call, raglane_convolve, raglane_convolve_backward);
  }

  void check_rglru() {
    raglane_rglru call{};
    begin(call);
    const int64_t N = elements, E = 1 + below(random, 200);
    call.channels = E, call.x = in(dtype, N * E), call.entry = in(dtype, N * E), call.recurrent = in(dtype, N * E);
    call.entry_bias = in(sums, E), call.recurrent_bias = in(sums, E), call.rates = in(sums, E);
    call.fresh = maybe_in(sums, N), call.initial = maybe_in(sums, sequences * E);
    call.output = out(dtype, N * E), call.final = out(sums, sequences * E);
    call.borders = out(sums, N / raglane_border() * E);
    call.grad_output = maybe_in(dtype, N * E), call.grad_final = maybe_in(sums, sequences * E);
    call.grad_x = maybe_out(dtype, N * E), call.grad_entry = maybe_out(dtype, N * E);
    call.grad_recurrent = maybe_out(dtype, N * E), call.grad_entry_bias = maybe_out(sums, E);
    call.grad_recurrent_bias = maybe_out(sums, E), call.grad_rates = maybe_out(sums, E);
    call.grad_fresh = maybe_out(sums, N), call.grad_initial = maybe_out(sums, sequences * E);
    compare(call, raglane_accumulate, raglane_accumulate_backward);
  }

  void check_attention() {
    raglane_attention call{};
    begin(call);
    const int64_t N = elements, B = sequences, G = 1 + below(random, 3), H = G * (1 + below(random, 3));
    const int64_t K = 1 + below(random, 40), V = 1 + below(random, 90), state = B * H * K * V;
    const bool stabilised = below(random, 3) == 0;
    call.key_heads = G, call.heads = H, call.key_size = K, call.value_size = V, call.scale = 0.5, call.eps = 1e-6;
    call.delta = !stabilised && below(random, 2), call.per_key = !stabilised && below(random, 2);
    call.q = in(dtype, N * G * K), call.k = in(dtype, N * G * K), call.v = in(dtype, N * H * V);
    call.log_decay = maybe_in(sums, N * H * (call.per_key ? K : 1));
    call.gain = stabilised ? nullptr : maybe_in(sums, N * H), call.log_gain = stabilised ? in(sums, N * H) : nullptr;
    call.initial = maybe_in(sums, state), call.output = out(dtype, N * H * V), call.final = out(sums, state);
    call.borders = out(sums, N / raglane_border() * H * K * (V + stabilised));
    if (call.delta) call.errors = out(sums, N * H * V);
    call.grad_output = maybe_in(dtype, N * H * V), call.grad_final = maybe_in(sums, state);
    call.grad_q = maybe_out(dtype, N * G * K), call.grad_k = maybe_out(dtype, N * G * K);
    call.grad_v = maybe_out(dtype, N * H * V), call.grad_initial = maybe_out(sums, state);
    if (call.log_decay) call.grad_log_decay = maybe_out(sums, N * H * (call.per_key ? K : 1));
    if (call.gain) call.grad_gain = maybe_out(sums, N * H);
    if (stabilised) {
      call.initial_normaliser = maybe_in(sums, B * H * K), call.initial_stabiliser = maybe_in(sums, B * H);
      call.final_normaliser = out(sums, B * H * K), call.final_stabiliser = out(sums, B * H);
      call.reads = out(sums, N * H), call.levels = out(sums, N * H);
      call.grad_final_normaliser = maybe_in(sums, B * H * K), call.grad_final_stabiliser = maybe_in(sums, B * H);
      call.grad_log_gain = maybe_out(sums, N * H), call.grad_initial_normaliser = maybe_out(sums, B * H * K);
      call.grad_initial_stabiliser = maybe_out(sums, B * H);
    }
    compare(call, raglane_attend, raglane_attend_backward);
  }

  void check_gated_norm() {
    raglane_gated_norm call{};
    const int64_t H = 1 + below(random, 5), V = 1 + below(random, 90), N = elements * H * V;
    call.abi = RAGLANE_ABI, call.isa = any_isa(random), call.dtype = sums, call.flags = RAGLANE_POISON;
    call.elements = elements, call.heads = H, call.size = V, call.centred = below(random, 2), call.silu = below(random, 2);
    call.eps = 1e-6, call.y = in(sums, N), call.gate = in(sums, N), call.weight = in(sums, H * V);
    call.output = out(sums, N), call.grad_y = out(sums, N), call.grad_gate = out(sums, N), call.grad_weight = out(sums, H * V);
    const void* grad = in(sums, N);
    const auto with = [&](const void* upstream) {
      return [&, upstream](raglane_gated_norm* norm, char* message, int64_t size) {
        norm->grad = upstream;
        return raglane_gate_norm(norm, message, size);
      };
    };
    compare(call, with(nullptr), with(grad));
  }
};
