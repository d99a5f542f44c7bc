// The peak of operations per second of a core for products, for benchmarks.
#pragma once

#include "abi/raglane.h"
#include "gemm/gemm.h"

namespace raglane::RAGLANE_TARGET {

// Enough independent sums to hide the latency of two multiply-adds of five cycles.
inline constexpr int chains = 12;

// Run `rounds` fused multiply-adds in each chain, only in registers; return the operations. For bfloat16 pairs
// it is the instruction of the products. All numbers are zeros, so none is denormal or overflows.
template <class S> int64_t multiply_registers(int64_t rounds) {
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;
  const volatile A zero = 0;
  V sums[chains];
#pragma GCC unroll 12
  for (int i = 0; i < chains; i++) {  // volatile reads, so that the compiler does not merge the chains
    A read = zero;
    sums[i] = splat_at(&read);
  }
  A read = zero;
  V a = splat_at(&read);
  for (int64_t k = 0; k < rounds; k++) {
#pragma GCC unroll 12
    for (int i = 0; i < chains; i++) sums[i] = multiply_add<S>(a, a, sums[i]);
  }
  A total = 0;
#pragma GCC unroll 12
  for (int i = 0; i < chains; i++) total += sums[i][0];
  const volatile A kept = total;  // so that the compiler does not remove the loop
  (void)kept;
  return rounds * chains * Lanes<A>::width * (in_pairs<S> ? 4 : 2);
}

#if defined(RAGLANE_TILES)
template <> inline int64_t multiply_registers<bfloat16>(int64_t rounds) {
  TileRegisters registers;
  TileRegisters::shape(most_tile_rows);  // all zeros
  for (int64_t k = 0; k < rounds; k++) {
    multiply_tiles<0, 4, 5>();
    multiply_tiles<1, 4, 6>();
    multiply_tiles<2, 4, 7>();
    multiply_tiles<3, 4, 5>();
  }
  return rounds * 4 * most_tile_rows * tile_words * tile_words * 4;
}
#endif

inline int64_t multiply_registers(int64_t dtype, int64_t rounds) {
  switch (dtype) {
#if !defined(RAGLANE_FAMILY)
    case RAGLANE_FLOAT32: return multiply_registers<float>(rounds);
    case RAGLANE_FLOAT64: return multiply_registers<double>(rounds);
#endif
    case RAGLANE_BFLOAT16: return multiply_registers<bfloat16>(rounds);
  }
  return -1;
}

}  // namespace raglane::RAGLANE_TARGET
