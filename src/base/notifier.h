// Notifier: one eventfd that many threads may ring and one owner sleeps on.
#pragma once

#include <atomic>

#include "base/fd.h"

namespace kvtransfer {

class Notifier {
 public:
  Notifier();

  int fd() const noexcept { return fd_.get(); }
  // Thread-safe, async-signal-safe. Rings at most once between two drains, so a burst of events
  // costs one system call.
  void ring() noexcept;
  // Owner only: forget past rings. Events published before a ring are visible after drain().
  void drain() noexcept;

 private:
  Fd fd_;
  std::atomic<bool> rung_{false};  // exchange in ring() pairs with the exchange in drain()
};

}  // namespace kvtransfer
