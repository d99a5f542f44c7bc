/* Reads a safetensors file: eight bytes of length, that many of JSON, then the numbers of all tensors.
 *
 * A tensor is taken by its name and its shape, once; at the end none may be left. Only float32 is read. */
#ifndef TENSORS_H
#define TENSORS_H

#include "files.h"

#include <math.h>

typedef struct tensors {
  const char* path;
  char* header; /* zero-terminated */
  const char* data;
  uint64_t data_size, taken_size;
  int64_t count, taken;
} tensors;

static tensors read_tensors(const char* path) {
  tensors found = {.path = path};
  uint64_t size, length;
  char* bytes = read_file(path, &size);
  if (size < 8) fail("is no safetensors file", path);
  memcpy(&length, bytes, 8); /* little-endian, as the machines that the kernels run on */
  if (length > size - 8) fail("is shorter than its header says", path);
  found.header = allocate((int64_t)length + 1, 1);
  memcpy(found.header, bytes + 8, length);
  found.data = bytes + 8 + length;
  found.data_size = size - 8 - length;
  const char* value = NULL;
  for (const char* at; (at = json_next(found.header, &value, path));) {
    if (*value != '{') fail("is no safetensors file", path);
    found.count += strncmp(at, "\"__metadata__\"", 14) != 0;
  }
  return found;
}

/* A number of at least 0 behind `sign`, `at` moving behind it. */
static uint64_t read_number(const char** at, char sign, const char* name) {
  const char* from = json_space(*at);
  if (*from != sign) fail("a shape or a place of another kind", name);
  from = json_space(from + 1);
  uint64_t found = 0;
  if (*from < '0' || *from > '9') fail("a shape or a place that is no number", name);
  for (; *from >= '0' && *from <= '9'; from++) {
    if (found > UINT64_MAX / 16) fail("a shape or a place beyond the file", name);
    found = 10 * found + (uint64_t)(*from - '0');
  }
  *at = from;
  return found;
}

/* The numbers of a tensor (rows, columns), or (rows) where columns is 0. */
static const float* take_tensor(tensors* all, const char* name, int64_t rows, int64_t columns) {
  const char* entry = json_find(all->header, name, all->path);
  if (!entry) fail("the weights have no such tensor", name);
  const char* dtype = json_find(entry, "dtype", all->path);
  const char* shape = json_find(entry, "shape", all->path);
  const char* place = json_find(entry, "data_offsets", all->path);
  if (!dtype || !shape || !place || strncmp(dtype, "\"F32\"", 5)) fail("is no tensor of float32", name);
  int fits = read_number(&shape, '[', name) == (uint64_t)rows;
  if (columns) fits = *json_space(shape) == ',' && read_number(&shape, ',', name) == (uint64_t)columns && fits;
  if (!fits || *json_space(shape) != ']') fail("is of another shape than the configuration has it", name);
  uint64_t begin = read_number(&place, '[', name), end = read_number(&place, ',', name);
  if (!columns) columns = 1;
  /* Divided first: the product may be beyond 64 bits. */
  if ((uint64_t)rows > all->data_size / 4 / (uint64_t)columns) fail("has more numbers than the file", name);
  uint64_t size = (uint64_t)(rows * columns);
  if (begin > end || end > all->data_size || end - begin != 4 * size || *json_space(place) != ']') {
    fail("is at a place that does not fit its shape", name);
  }
  /* The header's length need not keep the numbers aligned. */
  float* copy = allocate((int64_t)size, sizeof(float));
  memcpy(copy, all->data + begin, (size_t)(end - begin));
  for (uint64_t i = 0; i < size; i++) {
    if (!isfinite(copy[i])) fail("has numbers that are not finite", name);
  }
  all->taken++, all->taken_size += end - begin;
  return copy;
}

/* Refuse weights that nothing reads: the file is then of another model than the configuration. */
static void check_taken(const tensors* all) {
  if (all->taken != all->count) fail("has tensors that the configuration does not name", all->path);
  if (all->taken_size != all->data_size) fail("has other numbers than those of its tensors", all->path);
}

#endif
