#include "base/notifier.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "kvtransfer/error.h"

namespace kvtransfer {

Notifier::Notifier() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!fd_.valid()) throw Error(ErrorCode::kIo, "eventfd", errno);
}

void Notifier::ring() noexcept {
  if (rung_.exchange(true, std::memory_order_acq_rel)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(fd_.get(), &one, sizeof one);
}

// The descriptor is readable only while rung_ is set, so nothing is read for nothing. When the one
// that rings has set it and not written yet, both stay as they are: its write comes.
void Notifier::drain() noexcept {
  if (!rung_.load(std::memory_order_acquire)) return;
  uint64_t count;
  if (read(fd_.get(), &count, sizeof count) > 0) rung_.exchange(false, std::memory_order_acq_rel);
}

}  // namespace kvtransfer
