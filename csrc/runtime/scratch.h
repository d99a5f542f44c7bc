// Scratch memory of one call.
#pragma once

#include <string.h>

#include <new>

#include "runtime/blocks.h"
#include "runtime/tuning.h"
#include "simd/simd.h"

namespace raglane::RAGLANE_TARGET {

// Aligned for vectors, and freed at the end of the call.
template <class T> class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (block_.data) give_block(block_);
    else operator delete((void*)data_, alignment);
  }
  bool reserve(int64_t count, bool poison) {
    size_t bytes = ((size_t)count * sizeof(T) + 127) / 64 * 64;
    if (bytes >= tuning::least_block) block_ = take_block(bytes);
    data_ = (T*)(block_.data ? block_.data : operator new(bytes, alignment, std::nothrow));
    if (data_ && poison) memset((void*)data_, 0xff, bytes);
    return data_ != nullptr;
  }
  T* get() const { return data_; }

 private:
  static constexpr std::align_val_t alignment{64};

  T* data_ = nullptr;
  Block block_;    // if it is large
};

}  // namespace raglane::RAGLANE_TARGET
