// What the tests of this folder check with. It is no framework: they need a C++ compiler and nothing else.
#pragma once

#include <cstdio>

inline int failures = 0;

// Counts a failure and prints where it stands, and goes on: one run shows all that is wrong.
#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) {                                                         \
      ++failures;                                                               \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
    }                                                                           \
  } while (false)

// The exit code of a test program, and its last line.
inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures == 0 ? "ok" : "FAILED");
  return failures == 0 ? 0 : 1;
}
