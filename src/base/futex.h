// Waiting on a 32-bit atomic with a deadline (std::atomic::wait has none). See futex(2).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "base/clock.h"

namespace kvtransfer {

// Returns when `word` may differ from `seen`, or the deadline passed; spurious returns happen.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen,
                       int64_t deadline_ns) noexcept {
  timespec at{};
  const timespec* limit = nullptr;
  if (deadline_ns != kNoDeadline) {
    at.tv_sec = deadline_ns / 1'000'000'000;
    at.tv_nsec = deadline_ns % 1'000'000'000;
    limit = &at;
  }
  // WAIT_BITSET takes an absolute CLOCK_MONOTONIC time.
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, seen, limit, nullptr,
          FUTEX_BITSET_MATCH_ANY);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace kvtransfer
