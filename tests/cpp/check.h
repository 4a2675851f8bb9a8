// The checks of the tests in this folder. There is no framework: the tests need a C++ compiler only.
#pragma once

#include <cstdio>

inline int failures = 0;

// Counts a failure, prints its place, and goes on, so that one run shows all failures.
#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      ++failures;                                                               \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
    }                                                                           \
  } while (false)

// Prints the last line of a test program and returns its exit code.
inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures == 0 ? "ok" : "FAILED");
  return failures == 0 ? 0 : 1;
}
