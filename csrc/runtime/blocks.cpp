#include "runtime/blocks.h"

#include <stdlib.h>

#include <mutex>
#include <utility>

#include "runtime/tuning.h"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace raglane {

#ifdef MADV_FREE

namespace {

constexpr int most_waiting = 64;

std::mutex lock;
Block waiting[most_waiting];
int count = 0;

// glibc raises its threshold for returning blocks to the largest block that was freed, up to 32 MB, and trims its heap
// at twice that. The kernels' own blocks never reach glibc, so one untouched block of that size is freed here.
bool teach_allocator() {
  void* volatile block = malloc((32 << 20) - (64 << 10));    // volatile, so that no compiler removes it
  free(block);
  return true;
}

[[maybe_unused]] const bool taught = teach_allocator();  // when the library is loaded

Block remove(int place) { return std::exchange(waiting[place], waiting[--count]); }

// The smallest free block that is large enough, and not much too large; -1 if there is none.
int fitting(size_t bytes) {
  int found = -1;
  for (int i = 0; i < count; i++)
    if (waiting[i].size >= bytes && waiting[i].size / 2 <= bytes && (found < 0 || waiting[i].size < waiting[found].size))
      found = i;
  return found;
}

// The free block to replace by a new one: the largest that is too small, otherwise the largest; -1 if there is none.
int unfitting(size_t bytes) {
  int found = -1;
  for (int i = 0; i < count; i++) {
    if (found >= 0 && (waiting[found].size < bytes) != (waiting[i].size < bytes)) {
      if (waiting[i].size < bytes) found = i;
    } else if (found < 0 || waiting[i].size > waiting[found].size) {
      found = i;
    }
  }
  return found;
}

}  // namespace

// NOTE (forks): if a process forks while another thread holds the lock, it stays locked in the child. So no call waits
// for the lock: without it, a call does not use the free blocks.
Block take_block(size_t bytes) {
  Block old;
  if (std::unique_lock mine(lock, std::try_to_lock); mine) {
    int found = fitting(bytes);
    if (found >= 0) return remove(found);
    found = unfitting(bytes);
    if (found >= 0) old = remove(found);
  }
  if (old.data) munmap(old.data, old.size);
  // Lengths vary from call to call, so a sixteenth to an eighth is added; unwritten pages cost nothing.
  size_t step = 4096;
  while (step < bytes / 16) step *= 2;
  const size_t size = (bytes + step - 1) / step * step;
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
#ifdef MADV_HUGEPAGE
  // Writing the pages of a kept block again costs most of a fault for each: large pages are 512 times fewer.
  madvise(data, size, MADV_HUGEPAGE);
#endif
  return {data, size};
}

void give_block(Block block) {
  if (madvise(block.data, block.size, MADV_FREE) == 0)
    if (std::unique_lock mine(lock, std::try_to_lock); mine && count < most_waiting) {
      waiting[count++] = block;
      return;
    }
  munmap(block.data, block.size);
}

#else

Block take_block(size_t) { return {}; }
void give_block(Block) {}

#endif

}  // namespace raglane
