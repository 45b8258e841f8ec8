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

void Notifier::drain() noexcept {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = read(fd_.get(), &count, sizeof count);
  rung_.exchange(false, std::memory_order_acq_rel);
}

}  // namespace kvtransfer
