// The one clock: CLOCK_MONOTONIC in nanoseconds, comparable across processes of one machine.
#pragma once

#include <time.h>

#include <cstdint>

namespace kvtransfer {

inline int64_t now_ns() noexcept {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

// Deadlines are absolute times of that clock.
constexpr int64_t kNoDeadline = INT64_MAX;

}  // namespace kvtransfer
