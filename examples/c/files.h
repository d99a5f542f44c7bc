/* How this program fails, reads files, and finds its way in JSON: one line of words and exit code 2, whatever is in
 * them. */
#ifndef FILES_H
#define FILES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Two texts as one line of printable characters. */
static void fail(const char* what, const char* which) {
  fputs(PROGRAM ": error: ", stderr);
  for (; *which; which++) fputc(*which < 32 || *which > 126 ? '?' : *which, stderr);
  fprintf(stderr, ": %s\n", what);
  exit(2);
}

static void* allocate(int64_t count, size_t size) {
  if (count < 0 || (uint64_t)count > INT64_MAX / size) fail("is full", "memory");
  void* memory = calloc(count > 0 ? (size_t)count : 1, size);
  if (!memory) fail("is full", "memory");
  return memory;
}

static void* grown(void* memory, int64_t count, size_t size) {
  memory = realloc(memory, (size_t)count * size);
  if (!memory) fail("is full", "memory");
  return memory;
}

/* A whole file; zero-terminated, so that a text can be searched. */
static char* read_file(const char* path, uint64_t* size) {
  FILE* file = fopen(path, "rb");
  if (!file) fail("cannot be opened", path);
  int64_t room = 1 << 16;
  char* bytes = allocate(room, 1);
  *size = 0;
  for (size_t count; (count = fread(bytes + *size, 1, (size_t)room - 1 - *size, file)) > 0;) {
    *size += count;
    if ((int64_t)*size == room - 1) bytes = grown(bytes, room *= 2, 1);
  }
  if (ferror(file)) fail("cannot be read", path);
  fclose(file);
  bytes[*size] = 0;
  return bytes;
}

static const char* json_space(const char* at) { return at + strspn(at, " \t\r\n"); }

/* Behind the text, object, list, number or word that begins here; null where it does not end. */
static const char* json_skip(const char* at) {
  int64_t depth = 0;
  do {
    if (*at == '"') {
      for (at++; *at && *at != '"'; at++) {
        if (*at == '\\' && !*++at) return NULL;
      }
      if (!*at++) return NULL;
    } else if (*at == '{' || *at == '[') {
      depth++, at++;
    } else if (*at == '}' || *at == ']' || *at == ',' || *at == ':') {
      if (!depth) return NULL; /* nothing stands here */
      depth -= *at == '}' || *at == ']', at++;
    } else {
      size_t count = strcspn(at, " \t\r\n\"{}[],:");
      if (!count) return NULL;
      at += count;
    }
    if (depth) at = json_space(at);
  } while (depth);
  return at;
}

/* The next entry of an object: its name, in quotes, with `value` moving from the value before it, null at first, to its
 * own; null behind the last one. */
static const char* json_next(const char* object, const char** value, const char* where) {
  const char* at = *value ? json_skip(*value) : object;
  if (*value) at = json_space(at);
  if (*value && *at == '}') return NULL;
  if (*at != (*value ? ',' : '{')) fail("is no JSON", where);
  at = json_space(at + 1);
  if (!*value && *at == '}') return NULL;
  const char* colon = *at == '"' ? json_skip(at) : NULL;
  if (!colon || *(colon = json_space(colon)) != ':') fail("is no JSON", where);
  *value = json_space(colon + 1);
  if (!json_skip(*value)) fail("is no JSON", where);
  return at;
}

/* Where the value of an entry begins; null where there is no such entry. */
static const char* json_find(const char* object, const char* name, const char* where) {
  const char* value = NULL;
  size_t size = strlen(name);
  for (const char* at; (at = json_next(object, &value, where));) {
    if (!strncmp(at + 1, name, size) && at[1 + size] == '"') return value;
  }
  return NULL;
}

/* A value as a text: without its quotes, or as it stands there. */
static void read_entry(const char* object, const char* name, char* text, size_t size) {
  const char* value = json_find(object, name, "config.json");
  if (!value) fail("the configuration of the model has no such entry", name);
  size_t count = (size_t)(json_skip(value) - value);
  if (*value == '"') value++, count -= 2;
  if (count >= size) fail("is longer than all that this program runs", name);
  memcpy(text, value, count);
  text[count] = 0;
}

/* A whole number above 0 that begins here, with `end` behind it; 0 where there is none. */
static int64_t read_whole(const char* text, const char** end) {
  int64_t found = 0;
  for (; *text >= '0' && *text <= '9' && found < INT32_MAX; text++) found = 10 * found + (*text - '0');
  *end = text;
  return found;
}

static int64_t read_size(const char* object, const char* name) {
  char text[32];
  const char* end;
  read_entry(object, name, text, sizeof text);
  int64_t size = read_whole(text, &end);
  if (size < 1 || size > INT32_MAX || *end) fail("is no whole number from 1 to 2,147,483,647", name);
  return size;
}

#endif
