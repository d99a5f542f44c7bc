#include "runtime/threads.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(RAGLANE_OWN_THREADS)
#include <omp.h>
#endif
#if __has_include(<pthread.h>) && !defined(_WIN32)
#include <pthread.h>
#define RAGLANE_FORKS
#endif

#include "runtime/tuning.h"

namespace raglane {
namespace {

// Wait until the number is no longer the old one: poll, then let other threads use the core between polls, then sleep.
void wait(const std::atomic<unsigned>& number, unsigned old) {
  for (int polls = 0; polls < tuning::polls; polls++) {
    if (number.load(std::memory_order_acquire) != old) return;
    if (polls > tuning::spins) std::this_thread::yield();
    else pause();
  }
  number.wait(old, std::memory_order_acquire);
}

// A thread of the pool, which never ends. The calling thread writes the fields, increments `started`, and waits until
// `finished` is equal.
struct Worker {
  alignas(64) std::atomic<unsigned> started{0};
  Part part = nullptr;
  void* context = nullptr;
  int thread = 0, threads = 0;
  Worker* next = nullptr;
  alignas(64) std::atomic<unsigned> finished{0};

  void work() {
    for (unsigned calls = 0;; calls++) {
      wait(started, calls);
      part(context, thread, threads);
      finished.store(calls + 1, std::memory_order_release);
      finished.notify_one();
    }
  }
};

// A list of the workers that no call uses. Calls at the same time have different workers.
class Pool {
 public:
  Pool() {
#if defined(RAGLANE_FORKS)
    // The child has no workers, and makes new ones.
    pthread_atfork([] { pool().lock_.lock(); }, [] { pool().lock_.unlock(); },
                   [] { pool().idle_ = nullptr, pool().lock_.unlock(); });
#endif
  }

  // Never destroyed, because its workers use it until the process ends.
  static Pool& pool() {
    static Pool& made = *new Pool;
    return made;
  }

  void run(int threads, Part part, void* context) {
    Worker* first = nullptr;
    const int members = 1 + take(threads - 1, first);
    int thread = 0;
    for (Worker* each = first; each; each = each->next) {
      each->part = part, each->context = context, each->thread = ++thread, each->threads = members;
      each->started.fetch_add(1, std::memory_order_release);
      each->started.notify_one();
    }
    part(context, 0, members);
    for (Worker* each = first; each; each = each->next)
      wait(each->finished, each->started.load(std::memory_order_relaxed) - 1);
    give(first);
  }

 private:
  // Move up to `wanted` workers from the list to another one, in the same order; make missing ones.
  int take(int wanted, Worker*& first) {
    int taken = 0;
    Worker** end = &first;
    {
      std::lock_guard held(lock_);
      first = idle_;
      for (; taken < wanted && *end; taken++) end = &(*end)->next;
      idle_ = *end;
      *end = nullptr;
    }
    try {
      for (; taken < wanted; taken++) {
        Worker* made = new Worker;
        *end = made;
        std::thread([made] { made->work(); }).detach();
        end = &made->next;
      }
    } catch (const std::exception&) {  // no memory, or too many threads: the call has fewer
      delete *end;
      *end = nullptr;
    }
    return taken;
  }

  void give(Worker* first) {
    if (!first) return;
    Worker* last = first;
    while (last->next) last = last->next;
    std::lock_guard held(lock_);
    last->next = idle_;
    idle_ = first;
  }

  std::mutex lock_;
  Worker* idle_ = nullptr;
};

}  // namespace

#if defined(RAGLANE_OWN_THREADS)
bool own_threads() { return true; }
#else
bool own_threads() {
  static const bool own = [] {
    const char* chosen = getenv("RAGLANE_THREADS");
    return chosen && strcmp(chosen, "own") == 0;
  }();
  return own;
}
#endif

void run_threads(int threads, Part part, void* context) {
  if (own_threads()) return Pool::pool().run(threads, part, context);
#if !defined(RAGLANE_OWN_THREADS)
#pragma omp parallel num_threads(threads)
  part(context, omp_get_thread_num(), omp_get_num_threads());
#endif
}

}  // namespace raglane
