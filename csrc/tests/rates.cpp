// The speed of the micro-kernels, by shape and instruction set, as a share of the peak: the fused multiply-adds of
// the same instruction set only in registers, measured in turn; and of exp. One thread; all data in a core's own caches.
//
//   rates [seconds per figure]
#include "tests/rates.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "abi/raglane.h"
#include "targets/processor.h"

namespace {

using raglane::Rates;
using raglane::Shape;

#define RAGLANE_RATES(name, family, loops, ...) RAGLANE_IF(RAGLANE_BUILT_##name, RAGLANE_IF(loops, &raglane::name::rates)),
const Rates* const sets[] = {RAGLANE_TARGETS(RAGLANE_RATES)};

double seconds = 0.02;

double now() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Operations per second of run(rounds), which returns their number: the best of five, because others share the core.
double rate(const std::function<int64_t(int64_t)>& run) {
  int64_t rounds = 1;
  double best = 0;
  for (int taken = 0; taken < 5;) {
    double begun = now();
    double operations = (double)run(rounds), lasted = now() - begun;
    if (lasted < seconds) {
      rounds = lasted > 0.1 * seconds ? (int64_t)(rounds * seconds / lasted * 1.2) + 1 : rounds * 8;
      continue;
    }
    best = std::max(best, operations / lasted);
    taken++;
  }
  return best;
}

void print(const char* set, const char* dtype, int64_t number, const Rates& rates) {
  double peak = rate([&](int64_t rounds) { return rates.peak(number, rounds); });
  std::printf("%s, %s: peak %.1f GF/s per core\n", set, dtype, peak / 1e9);
  const int64_t depths[] = {32, 128, 512};
  std::printf("  %-16s", "rows x vectors");
  for (int64_t depth : depths) std::printf("  %8s %3lld", "depth", (long long)depth);
  std::printf("\n");
  const int most = rates.most_rows(1);
  for (int rows : most == 6 ? std::vector{1, 2, 3, 4, 6} : std::vector{1, most / 3, 2 * most / 3, most}) {
    for (int vectors = 1; vectors <= rates.most_vectors && rows <= rates.most_rows(vectors); vectors++) {
      std::printf("  %3d x %-10d", rows, vectors);
      for (int64_t depth : depths) {
        // Panels of 256 KB fit a core's second cache, but not the first, as in a layer of some hundred units.
        int64_t panels = std::max<int64_t>(1, (1 << 16) / (depth * vectors * rates.width));
        Shape shape{rows, vectors, depth};
        double here = rate([&](int64_t rounds) { return rates.multiply(number, shape, panels, rounds); });
        std::printf("  %5.0f (%.2f)", here / 1e9, here / peak);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  if (number == RAGLANE_BFLOAT16) return;
  double exponentials = rate([&](int64_t rounds) { return rates.exponentials(number, rounds); });
  std::printf("  exp: %.2f giga per second\n", exponentials / 1e9);
}

}  // namespace

int main(int count, char** words) {
  if (count > 1) seconds = std::atof(words[1]);
  if (!(seconds > 0)) return std::fprintf(stderr, "rates: seconds per figure: a number above 0\n"), 2;
  for (int64_t isa = 0; raglane::isa_name(isa); isa++) {
    if (!raglane::processor_has(isa)) continue;
    const char* name = raglane::isa_name(isa);
    if (raglane::has_all_dtypes(isa)) {
      print(name, "float32", RAGLANE_FLOAT32, *sets[isa]);
      print(name, "float64", RAGLANE_FLOAT64, *sets[isa]);
    } else {
      print(name, "bfloat16", RAGLANE_BFLOAT16, *sets[isa]);
    }
  }
}
