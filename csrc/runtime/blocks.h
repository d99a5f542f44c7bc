// Large blocks of memory, which stay for the next call.
//
// What a call needs, the next one needs again, about as much of it. The C library hands blocks of more than 32 MB back to
// the system at once, and a new one costs a fault for each of its pages; see tuning.h for how much that is. Blocks that wait
// here are the system's if it runs out of memory, and are never more than were in use at once.
#pragma once

#include <stddef.h>

namespace raglane {

struct Block {
  void* data = nullptr;
  size_t size = 0;  // bytes
};

// A block of so many bytes at least, of unknown content; no data where there is no memory.
Block take_block(size_t bytes);

// Give back a block that is no longer read or written.
void give_block(Block block);

}  // namespace raglane
