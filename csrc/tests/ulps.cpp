// Tests the functions of the cells with every float, for every supported instruction set: the error, computed in
// double, in units in the last place of the nearest float. Fails if it is more than four.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "abi/raglane.h"
#include "runtime/threads.h"
#include "targets/processor.h"

namespace {

constexpr int64_t block = 1 << 14;
constexpr int64_t blocks = (int64_t(1) << 32) / block;
// By raglane_function.
const char* const functions[] = {"exp", "tanh", "sigmoid", "expm1", "log", "log1p", "erf", "sqrt", "softplus"};

double truth(int function, double x) {
  switch (function) {
    case RAGLANE_EXP: return std::exp(x);
    case RAGLANE_TANH: return std::tanh(x);
    case RAGLANE_EXPM1: return std::expm1(x);
    case RAGLANE_LOG: return std::log(x);
    case RAGLANE_LOG1P: return std::log1p(x);
    case RAGLANE_ERF: return std::erf(x);
    case RAGLANE_SQRT: return std::sqrt(x);
    case RAGLANE_SOFTPLUS: return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
    default: return 1 / (1 + std::exp(-x));
  }
}

// The distance from one float to the next one away from zero.
double spacing(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint64_t exponent = bits >> 23 & 255, power = (exponent > 1 ? exponent : 1) - 150 + 1023;
  power <<= 52;
  double space;
  std::memcpy(&space, &power, 8);
  return space;
}

// The error of one value in units in the last place, infinite if it is not a number.
double error(float got, double wanted) {
  const double wrong = std::numeric_limits<double>::infinity();
  if (std::isnan(wanted) || std::isnan(got)) return std::isnan(wanted) && std::isnan(got) ? 0 : wrong;
  float nearest = (float)wanted;
  if (got == nearest && std::isinf(got)) return 0;
  // If one of the two overflows, the other must be adjacent to it.
  if (std::isinf(got) || std::isinf(nearest)) return wanted > 3.4028e38 ? 0 : wrong;
  return std::abs((double)got - wanted) / spacing(nearest);
}

// The largest error of a function over all floats, for each instruction set.
std::vector<double> worst_of(int function, const std::vector<int64_t>& isas) {
  std::vector<double> worst(isas.size(), 0);
  std::atomic<int64_t> next = 0;
  std::mutex lock;
  raglane::on_threads((int)std::max(1u, std::thread::hardware_concurrency()), [&](int, int) {
    std::vector<float> x(block), got(block);
    std::vector<double> wanted(block), mine(isas.size(), 0);
    for (int64_t b; (b = next++) < blocks;) {
      for (int64_t i = 0; i < block; i++) {
        uint32_t bits = (uint32_t)(b * block + i);
        std::memcpy(&x[i], &bits, 4);
        wanted[i] = truth(function, x[i]);
      }
      for (size_t s = 0; s < isas.size(); s++) {
        if (raglane_apply(isas[s], RAGLANE_FLOAT32, 1, function, x.data(), nullptr, got.data(), block, nullptr, 0) != RAGLANE_OK)
          mine[s] = std::numeric_limits<double>::infinity();
        for (int64_t i = 0; i < block; i++) mine[s] = std::max(mine[s], error(got[i], wanted[i]));
      }
    }
    std::lock_guard held(lock);
    for (size_t s = 0; s < isas.size(); s++) worst[s] = std::max(worst[s], mine[s]);
  });
  return worst;
}

}  // namespace

int main() {
  std::vector<int64_t> isas;
  for (int64_t isa = 0; raglane::isa_name(isa); isa++)
    if (raglane::processor_has(isa) && raglane::has_all_dtypes(isa)) isas.push_back(isa);
  bool fails = false;
  for (int function = RAGLANE_EXP; function <= RAGLANE_SOFTPLUS; function++) {
    std::vector<double> worst = worst_of(function, isas);
    for (size_t s = 0; s < isas.size(); s++) {
      std::printf("%s, %s: %.3f ulp at most\n", functions[function], raglane_isa_name(isas[s]), worst[s]);
      fails = fails || !(worst[s] <= 4);
    }
    std::fflush(stdout);
  }
  return fails;
}
