// Random numbers in buffers of their exact size, for the driver.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "abi/raglane.h"

using Bytes = std::vector<unsigned char>;

inline int64_t bytes_of(int64_t dtype) { return dtype == RAGLANE_FLOAT64 ? 8 : dtype == RAGLANE_BFLOAT16 ? 2 : 4; }

inline Bytes random_reals(int64_t dtype, int64_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-0.5f, 0.5f);
  Bytes bytes(count * bytes_of(dtype));
  for (int64_t i = 0; i < count; i++) {
    float value = uniform(random);
    double wide = value;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint16_t half = (uint16_t)(bits >> 16);
    const void* from = dtype == RAGLANE_FLOAT64 ? (void*)&wide : dtype == RAGLANE_BFLOAT16 ? (void*)&half : (void*)&value;
    std::memcpy(bytes.data() + i * bytes_of(dtype), from, bytes_of(dtype));
  }
  return bytes;
}

inline int64_t below(std::mt19937& random, int n) { return (int64_t)(random() % n); }

// Pools of states: rows of 0xff bytes, but in the slots of some sequences the states of a call, widened to `to` bytes.
struct Pools {
  std::vector<int64_t> slots;
  int64_t count;

  Pools(int64_t sequences, std::mt19937& random) : count(sequences + below(random, 4)) {
    for (int64_t slot = 0; slot < count; slot++) slots.push_back(slot);
    std::shuffle(slots.begin(), slots.end(), random);
    slots.resize(sequences);
    slots.reserve(sequences);
  }
  // `from` may be null, for zeros; a number of 2 bytes becomes the upper half of one of 4.
  Bytes filled(const void* from, int64_t numbers, int64_t bytes, int64_t to) const {
    Bytes pool(count * numbers * to, 0xff);
    for (size_t b = 0; b < slots.size(); b++)
      for (int64_t i = 0; i < numbers; i++) {
        unsigned char* number = pool.data() + (slots[b] * numbers + i) * to;
        std::memset(number, 0, to);
        if (from) std::memcpy(number + to - bytes, (const unsigned char*)from + (b * numbers + i) * bytes, bytes);
      }
    return pool;
  }
};

// Return a supported instruction set.
inline int64_t any_isa(std::mt19937& random) {
  std::vector<int64_t> isas;
  for (int64_t isa = 0; raglane_isa_name(isa); isa++)
    if (raglane_has_isa(isa)) isas.push_back(isa);
  return isas[random() % isas.size()];
}
