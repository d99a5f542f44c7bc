/* Reads a safetensors file: eight bytes of length, that many of JSON, then the numbers of all tensors.
 *
 * The file is kept in memory as it is; a tensor is a pointer into it. Only float32 is read. */
#ifndef TENSORS_H
#define TENSORS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tensor {
  const float* data;
  int64_t rows, columns; /* a vector has one column; tensors of more dimensions count the first as rows */
} tensor;

typedef struct tensors {
  char* bytes;
  char* header; /* zero-terminated */
  const char* data;
  uint64_t data_size;
} tensors;

static void fail(const char* what, const char* which) {
  fprintf(stderr, "predict: error: %s: %s\n", which, what);
  exit(2);
}

/* A whole file; zero-terminated, so that a text can be searched. */
static char* read_file(const char* path, uint64_t* size) {
  FILE* file = fopen(path, "rb");
  if (!file) fail("cannot be opened", path);
  if (fseek(file, 0, SEEK_END) != 0) fail("is no file", path);
  long end = ftell(file);
  if (end < 0) fail("is no file", path);
  rewind(file);
  char* bytes = malloc((size_t)end + 1);
  if (!bytes) fail("does not fit into memory", path);
  if (fread(bytes, 1, (size_t)end, file) != (size_t)end) fail("cannot be read", path);
  fclose(file);
  bytes[end] = 0;
  *size = (uint64_t)end;
  return bytes;
}

static tensors read_tensors(const char* path) {
  tensors found;
  uint64_t size, length;
  found.bytes = read_file(path, &size);
  if (size < 8) fail("is no safetensors file", path);
  memcpy(&length, found.bytes, 8); /* little-endian, as the machines that the kernels run on */
  if (length > size - 8) fail("is shorter than its header says", path);
  found.header = malloc(length + 1);
  if (!found.header) fail("does not fit into memory", path);
  memcpy(found.header, found.bytes + 8, length);
  found.header[length] = 0;
  found.data = found.bytes + 8 + length;
  found.data_size = size - 8 - length;
  return found;
}

/* A tensor by its name; without data where there is none. */
static tensor find_tensor(const tensors* all, const char* name) {
  tensor found = {NULL, 0, 1};
  char key[256];
  if (snprintf(key, sizeof key, "\"%s\":", name) >= (int)sizeof key) fail("a name that is too long", name);
  const char* entry = strstr(all->header, key);
  if (!entry) return found;
  const char* end = strchr(entry, '}');
  const char* dtype = strstr(entry, "\"dtype\":\"F32\"");
  const char* shape = strstr(entry, "\"shape\":[");
  const char* place = strstr(entry, "\"data_offsets\":[");
  if (!end || !dtype || !shape || !place || dtype > end || shape > end || place > end) fail("not of float32", name);
  char* next;
  int64_t sizes[2] = {1, 1};
  shape += strlen("\"shape\":[");
  for (int count = 0; *shape != ']'; count++) {
    int64_t one = strtoll(shape, &next, 10);
    if (next == shape || one < 0 || one > INT32_MAX) fail("a shape that cannot be read", name);
    if (count == 0) sizes[0] = one;
    else sizes[1] *= one;
    shape = *next == ',' ? next + 1 : next;
  }
  uint64_t begin = strtoull(place + strlen("\"data_offsets\":["), &next, 10);
  uint64_t stop = strtoull(next + 1, &next, 10);
  if (begin > stop || stop > all->data_size || stop - begin != (uint64_t)(sizes[0] * sizes[1]) * 4) {
    fail("offsets that do not fit its shape", name);
  }
  /* The header's length need not keep the numbers aligned. */
  float* copy = malloc((size_t)(stop - begin) + 1);
  if (!copy) fail("does not fit into memory", name);
  memcpy(copy, all->data + begin, (size_t)(stop - begin));
  found.data = copy;
  found.rows = sizes[0];
  found.columns = sizes[1];
  return found;
}

#endif
