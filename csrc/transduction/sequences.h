// Work on each sequence of a batch, by the threads of a call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <vector>

#include "abi/failure.h"
#include "runtime/threads.h"

namespace raglane {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// Run body(b) for each sequence on up to `threads` threads. An exception of the first sequence that fails is thrown.
template <class Body> void for_each_sequence(int64_t threads, int64_t sequences, Body&& body) {
  std::atomic<int64_t> next{0};
  std::vector<std::exception_ptr> failures(sequences);
  on_threads((int)std::clamp<int64_t>(threads, 1, std::max<int64_t>(sequences, 1)), [&](int, int) {
    for (int64_t b; (b = next++) < sequences;) try {
        body(b);
      } catch (...) {
        failures[b] = std::current_exception();
      }
  });
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace raglane
