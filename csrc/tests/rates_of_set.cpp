// The micro-kernels for one instruction set; see rates.cpp.
#include "runtime/scratch.h"
#include "simd/activations.h"
#include "targets/peak.h"
#include "tests/rates.h"

namespace raglane::RAGLANE_TARGET {
namespace {

template <class S> int64_t multiply_panels(const Shape& shape, int64_t panels, int64_t rounds) {
  using A = typename Arithmetic<S>::type;
  constexpr int width = Lanes<A>::width;
#if defined(RAGLANE_TILES)
  TileRegisters registers;
#endif
  const int64_t depth = words<S>(shape.depth), panel = depth * shape.vectors * width;
  const int64_t row = (depth + width - 1) / width * width, sums = (int64_t)shape.vectors * width;
  Scratch<A> memory;
  if (!memory.reserve(panels * panel + tile_rows * (row + panels * sums), false)) return 0;
  memset((void*)memory.get(), 0, (panels * panel + tile_rows * (row + panels * sums)) * sizeof(A));
  A* rows[tile_rows];
  A* to[tile_rows];
  for (int r = 0; r < tile_rows; r++) rows[r] = memory.get() + panels * panel + r * row;
  int64_t at[panel_vectors];
  for (int v = 0; v < panel_vectors; v++) at[v] = v * width;
  for (int64_t i = 0; i < rounds; i++)
    for (int64_t p = 0; p < panels; p++) {
      for (int r = 0; r < tile_rows; r++) to[r] = memory.get() + panels * panel + tile_rows * row + (p * tile_rows + r) * sums;
      multiply<typename Operand<S>::type>(
          shape.rows, shape.vectors, {rows, memory.get() + p * panel, depth, (const A* const*)to, at, to, at});
    }
  return rounds * panels * 2 * shape.rows * sums * shape.depth;
}

int64_t multiply_dtype(int64_t dtype, const Shape& shape, int64_t panels, int64_t rounds) {
  switch (dtype) {
#if !defined(RAGLANE_FAMILY)
    case RAGLANE_FLOAT32: return multiply_panels<float>(shape, panels, rounds);
    case RAGLANE_FLOAT64: return multiply_panels<double>(shape, panels, rounds);
#endif
    case RAGLANE_BFLOAT16: return multiply_panels<bfloat16>(shape, panels, rounds);
  }
  return 0;
}

// As many at a time as in the selective scan; the numbers are those of its decays, dt A.
template <class A> int64_t exponentiate(int64_t rounds) {
  constexpr int width = Lanes<A>::width, together = 4, groups = 16;
  A numbers[groups * together * width];
  for (int i = 0; i < groups * together * width; i++) numbers[i] = (A)-0.01 * (A)(1 + i % 200);
  A total = 0;
  for (int64_t k = 0; k < rounds; k++) {
    Vec<A> sums[together] = {};
    for (int group = 0; group < groups; group++) {
      Vec<A> x[together];
#pragma GCC unroll 4
      for (int i = 0; i < together; i++) x[i] = load(numbers + (group * together + i) * width);
      exp<A, together>(x);
#pragma GCC unroll 4
      for (int i = 0; i < together; i++) sums[i] += x[i];
    }
    numbers[k % width] = (A)-1e-3 * sums[0][0];  // so that the compiler does not merge the rounds
    total += (sums[0] + sums[1] + sums[2] + sums[3])[0];
  }
  const volatile A kept = total;
  (void)kept;
  return rounds * groups * together * width;
}

int64_t exponentials(int64_t dtype, int64_t rounds) {
  switch (dtype) {
#if !defined(RAGLANE_FAMILY)
    case RAGLANE_FLOAT32: return exponentiate<float>(rounds);
    case RAGLANE_FLOAT64: return exponentiate<double>(rounds);
#endif
  }
  return 0;
}

}  // namespace

extern const Rates rates = {panel_vectors, Lanes<float>::width, most_rows, multiply_registers, multiply_dtype, exponentials};
}  // namespace raglane::RAGLANE_TARGET
