// Errors of the C interface: exceptions inside, a status and a message outside.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <new>

#include "abi/raglane.h"

namespace raglane {

// The exception of an error; guarded() catches all of them.
struct Failure {
  int32_t status;
  char text[256];
};

[[noreturn]] [[gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
  Failure failure{RAGLANE_BAD_ARGUMENT, {}};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(failure.text, sizeof failure.text, format, arguments);
  va_end(arguments);
  throw failure;
}

inline void at_least(const char* name, int64_t value, int64_t least) {
  if (value < least) fail("%s must be at least %lld, got %lld", name, (long long)least, (long long)value);
}

inline void present(const char* name, const void* pointer) {
  if (!pointer) fail("%s must be an address in this call, got null", name);
}

inline int32_t report(int32_t status, const char* text, char* message, int64_t size) {
  if (message && size > 0) std::snprintf(message, size, "%s", text);
  return status;
}

// Run body(), which may throw, and return its status.
template <class Body> int32_t guarded(char* message, int64_t size, Body&& body) {
  try {
    int32_t status = body();
    if (status == RAGLANE_OUT_OF_MEMORY) throw std::bad_alloc();
    return status;
  } catch (const Failure& failure) {
    return report(failure.status, failure.text, message, size);
  } catch (const std::bad_alloc&) {
    return report(RAGLANE_OUT_OF_MEMORY, "not enough memory for the kernel's scratch", message, size);
  } catch (...) {
    return report(RAGLANE_BAD_ARGUMENT, "an unknown failure", message, size);
  }
}

}  // namespace raglane
