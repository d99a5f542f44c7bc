// The barrier of a team of threads.
#pragma once

#include <thread>

#include "runtime/threads.h"
#include "runtime/tuning.h"
#include "simd/simd.h"

namespace raglane::RAGLANE_TARGET {

// Used once per step. Waiting threads read one cache line, arriving threads write another.
struct Barrier {
  alignas(64) int arrived = 0;
  alignas(64) int round = 0;

  void wait(int members) {
    if (members == 1) return;
    int mine = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == members) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&round, mine + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&round, __ATOMIC_ACQUIRE) == mine; spins++) {
      // On a shared core, yield to the thread that has not arrived yet.
      if (spins > tuning::spins) std::this_thread::yield();
      else pause();
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
