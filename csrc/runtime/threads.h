// Starts the threads of a call.
#pragma once

#include <omp.h>
#include <stdint.h>

#if defined(RAGLANE_PLAIN_THREADS)
#include <thread>
#include <vector>
#endif

namespace raglane {

// The rounding mode and the treatment of denormal numbers. Each thread has its own control word, and a thread that
// OpenMP started earlier has the word of that time. So all threads of a call use the caller's: results must not depend
// on the thread that computes them.
#if defined(__x86_64__)
using ControlWord = uint32_t;
inline ControlWord control_word() { return __builtin_ia32_stmxcsr() & ~0x3fu; }  // without the exception flags
inline void set_control_word(ControlWord word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
using ControlWord = uint64_t;
inline ControlWord control_word() {
  ControlWord word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
inline void set_control_word(ControlWord word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
using ControlWord = int;
inline ControlWord control_word() { return 0; }
inline void set_control_word(ControlWord) {}
#endif

// Sets the caller's control word in a thread while it works on a call.
class UnderControl {
 public:
  explicit UnderControl(ControlWord callers) : own_(control_word()), differs_(own_ != callers) {
    if (differs_) set_control_word(callers);
  }
  UnderControl(const UnderControl&) = delete;
  ~UnderControl() {
    if (differs_) set_control_word(own_);
  }

 private:
  const ControlWord own_;
  const bool differs_;
};

// Run body(thread, threads) on up to `threads` threads.
template <class Body> void on_threads(int threads, Body&& body) {
  if (threads == 1) return body(0, 1);
  const ControlWord callers = control_word();
#if defined(RAGLANE_PLAIN_THREADS)  // for ThreadSanitizer, which does not support OpenMP's barriers
  std::vector<std::thread> started;
  for (int i = 0; i < threads; i++)
    started.emplace_back([&, i] {
      UnderControl control(callers);
      body(i, threads);
    });
  for (std::thread& thread : started) thread.join();
#else
#pragma omp parallel num_threads(threads)
  {
    UnderControl control(callers);
    body(omp_get_thread_num(), omp_get_num_threads());
  }
#endif
}

}  // namespace raglane
