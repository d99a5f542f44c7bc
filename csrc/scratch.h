// Memory of one call.
#pragma once

#include <stdlib.h>

#include "simd.h"

namespace raglane::RAGLANE_TARGET {

// Aligned for vectors, given back at the call's end.
template <class T> class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(data_); }
  bool reserve(int64_t count, bool poison) {
    size_t bytes = ((size_t)count * sizeof(T) + 127) / 64 * 64;
    data_ = (T*)aligned_alloc(64, bytes);
    if (data_ && poison) memset((void*)data_, 0xff, bytes);
    return data_ != nullptr;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace raglane::RAGLANE_TARGET
