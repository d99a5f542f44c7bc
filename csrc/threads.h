// The start of all threads of a call.
#pragma once

#include <omp.h>

#if defined(RAGLANE_PLAIN_THREADS)
#include <thread>
#include <vector>
#endif

namespace raglane {

// Run body(thread, threads) on as many threads.
template <class Body> void on_threads(int threads, Body&& body) {
  if (threads == 1) return body(0, 1);
#if defined(RAGLANE_PLAIN_THREADS)  // for ThreadSanitizer, which does not know OpenMP's barriers
  std::vector<std::thread> started;
  for (int i = 0; i < threads; i++) started.emplace_back([&, i] { body(i, threads); });
  for (std::thread& thread : started) thread.join();
#else
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
#endif
}

}  // namespace raglane
