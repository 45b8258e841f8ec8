// Sleeping on descriptors until a deadline of the one clock.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"

namespace kvtransfer {

inline timespec time_left(int64_t deadline_ns) noexcept {
  const int64_t left = std::max<int64_t>(deadline_ns - now_ns(), 0);
  return {left / 1'000'000'000, left % 1'000'000'000};
}

// True when `own` is readable; `scratch` spares an allocation per call.
inline bool wait_readable(int own, std::span<const int> fds, int64_t deadline_ns,
                          std::vector<pollfd>& scratch) noexcept {
  scratch.clear();
  scratch.push_back({own, POLLIN, 0});
  for (const int fd : fds) scratch.push_back({fd, POLLIN, 0});
  const timespec timeout = deadline_ns == kNoDeadline ? timespec{} : time_left(deadline_ns);
  ppoll(scratch.data(), scratch.size(), deadline_ns == kNoDeadline ? nullptr : &timeout, nullptr);
  return scratch[0].revents != 0;
}

}  // namespace kvtransfer
