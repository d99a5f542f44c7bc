// A randomised driver for the sanitizers: many small calls through the C interface, with every buffer on the heap at
// its exact size, so that AddressSanitizer sees the first byte outside of one. It checks what can be checked without
// a second implementation: that results are finite, and the same bits however the work is divided.
//
//   drive [rounds] [seed]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../raglane.h"

namespace {

using Bytes = std::vector<unsigned char>;

struct Case {
  raglane_layer layer{};
  std::vector<int64_t> offsets;
  std::vector<Bytes> inputs;  // values, h, c, weights
  std::vector<Bytes> results; // output, final h, final c, gates, cells, then what backward gives
};

int64_t bytes_of(int64_t dtype) { return dtype == RAGLANE_FLOAT64 ? 8 : dtype == RAGLANE_FLOAT32 ? 4 : 2; }

Bytes random_reals(int64_t dtype, int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  Bytes bytes(count * bytes_of(dtype));
  for (int64_t i = 0; i < count; i++) {
    float value = uniform(random);
    double wide = value;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint16_t half = (uint16_t)(bits >> 16);
    const void* from = dtype == RAGLANE_FLOAT64 ? (void*)&wide : dtype == RAGLANE_FLOAT32 ? (void*)&value : (void*)&half;
    std::memcpy(bytes.data() + i * bytes_of(dtype), from, bytes_of(dtype));
  }
  return bytes;
}

Case draw(std::mt19937& random) {
  auto below = [&](int n) { return (int64_t)(random() % n); };
  Case c;
  raglane_layer& l = c.layer;
  l.abi = RAGLANE_ABI;
  do l.isa = below(3); while (!raglane_has_isa(l.isa));
  l.cell = below(4), l.dtype = below(3), l.directions = 1 + below(2), l.threads = 1 + below(4);
  l.sequences = below(12), l.input_size = 1 + below(40), l.hidden_size = 1 + below(70);
  l.projection_size = l.cell == RAGLANE_LSTM && below(3) == 0 ? 1 + below(40) : 0;
  c.offsets.push_back(0);
  for (int64_t b = 0; b < l.sequences; b++) c.offsets.push_back(c.offsets.back() + (below(4) ? below(9) : 0));
  l.elements = c.offsets.back(), l.offsets = c.offsets.data();

  int64_t gates = l.cell == RAGLANE_LSTM ? 4 : l.cell == RAGLANE_GRU ? 3 : 1, saved = l.cell >= RAGLANE_LSTM ? 4 : 0;
  int64_t K = l.directions, N = l.elements, H = l.hidden_size, P = l.projection_size ? l.projection_size : H;
  bool lstm = l.cell == RAGLANE_LSTM;
  c.inputs.reserve(64), c.results.reserve(64);
  auto in = [&](int64_t count) { return (const void*)c.inputs.emplace_back(random_reals(l.dtype, count, random)).data(); };
  auto out = [&](int64_t count) { return (void*)c.results.emplace_back(count * bytes_of(l.dtype)).data(); };
  l.values = in(N * l.input_size), l.initial_h = in(K * l.sequences * P);
  l.initial_c = lstm ? in(K * l.sequences * H) : nullptr;
  for (int64_t d = 0; d < K; d++) {
    l.weights[d] = {in(gates * H * l.input_size), in(gates * H * P), nullptr, nullptr, nullptr};
    if (below(2)) l.weights[d].input_bias = in(gates * H);
    if (below(2)) l.weights[d].hidden_bias = in(gates * H);
    if (l.projection_size) l.weights[d].projection = in(P * H);
  }
  l.grad_output = below(3) ? in(N * K * P) : nullptr;
  l.grad_final_h = below(3) ? in(K * l.sequences * P) : nullptr;
  l.grad_final_c = lstm && below(3) ? in(K * l.sequences * H) : nullptr;
  l.output = out(N * K * P), l.final_h = out(K * l.sequences * P);
  l.final_c = lstm ? out(K * l.sequences * H) : nullptr;
  l.gate_stride = (saved ? saved : 1) * ((H + 15) / 16 * 16) + below(3);
  l.gates = out(K * N * (saved ? l.gate_stride : 0)), l.cells = lstm ? out(K * N * H) : nullptr;
  l.grad_gates = out(K * N * l.gate_stride), l.previous_h = out(K * N * P);
  l.grad_h = l.projection_size ? out(K * N * P) : nullptr;
  l.unprojected = l.projection_size ? out(K * N * H) : nullptr;
  l.grad_initial_h = out(K * l.sequences * P), l.grad_initial_c = lstm ? out(K * l.sequences * H) : nullptr;
  if (!saved) l.gates = nullptr;
  return c;
}

void run(Case& c) {
  char message[256] = "";
  if (raglane_forward(&c.layer, message, sizeof message) != RAGLANE_OK ||
      raglane_backward(&c.layer, message, sizeof message) != RAGLANE_OK) {
    std::fprintf(stderr, "failed: %s\n", message);
    std::exit(1);
  }
}

void drive(int rounds, unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; round++) {
    Case c = draw(random);
    std::vector<Bytes> wanted;
    for (int64_t flags : {RAGLANE_FOLD | RAGLANE_NO_TEAM, RAGLANE_PREPARE | RAGLANE_NO_TEAM,
                          RAGLANE_PREPARE | RAGLANE_TEAM, RAGLANE_FOLD | RAGLANE_TEAM}) {
      c.layer.flags = RAGLANE_POISON | flags;
      for (Bytes& bytes : c.results)
        if (!bytes.empty()) std::memset(bytes.data(), 0xff, bytes.size());
      run(c);
      if (wanted.empty()) wanted = c.results;
      if (c.results != wanted) {
        std::fprintf(stderr, "round %d, seed %u: other bits with flags %d\n", round, seed, (int)flags);
        std::exit(1);
      }
    }
  }
}

}  // namespace

int main(int count, char** words) {
  int rounds = count > 1 ? std::atoi(words[1]) : 300;
  unsigned seed = count > 2 ? (unsigned)std::atoi(words[2]) : 1;
  drive(rounds, seed);
  // From two threads at once: the kernels share nothing.
  std::thread other([=] { drive(rounds / 4, seed + 1); });
  drive(rounds / 4, seed + 2);
  other.join();
  std::printf("%d rounds passed\n", rounds + rounds / 4 * 2);
}
