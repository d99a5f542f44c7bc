// An allocator for large blocks of memory, which are kept for the next call.
//
// Consecutive calls need blocks of similar sizes. The C library returns blocks of more than 32 MB to the system at
// once, and a new one costs a page fault per page; tuning.h has the measurements. Pages are large where the system has
// such. The system may reclaim the pages of free blocks. Free and used blocks together never exceed the maximum that was
// in use at one time.
#pragma once

#include <stddef.h>

namespace raglane {

struct Block {
  void* data = nullptr;
  size_t size = 0;  // bytes
};

// Return an uninitialised block of at least `size` bytes; its data is null if memory is exhausted.
Block take_block(size_t bytes);

// Free a block that is no longer read or written.
void give_block(Block block);

}  // namespace raglane
