// The threads of a call: OpenMP's, or those of a pool of the library's own.
#pragma once

#include <stdint.h>

namespace raglane {

inline constexpr int64_t most_threads = 4096;  // a larger number is a mistake

// The part of one thread in a call.
using Part = void (*)(void* context, int thread, int threads);

// Run a part on each of up to `threads` threads, of which the calling one is number 0.
void run_threads(int threads, Part part, void* context);

// True if the library was built without OpenMP, or if the environment variable RAGLANE_THREADS is "own".
bool own_threads();

// Make a waiting thread use less of its core.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// The rounding mode and the treatment of denormal numbers. Each thread has its own control word, and a thread that
// was started earlier has the word of that time. So all threads of a call use the caller's: results must not depend
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
  auto part = [&](int thread, int members) {
    UnderControl control(callers);
    body(thread, members);
  };
  run_threads(threads, [](void* context, int thread, int members) { (*(decltype(part)*)context)(thread, members); }, &part);
}

}  // namespace raglane
