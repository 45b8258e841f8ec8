#include "transport/shm_listener.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/shm_link.h"

namespace kvtransfer {

namespace {
constexpr int64_t kHandshakeNs = 5'000'000'000;
}

ShmListener::ShmListener(std::string address, ShmIdentity self,
                         std::vector<std::shared_ptr<MemoryRegion>> local_regions,
                         std::function<void()> wake)
    : address_(std::move(address)),
      self_(std::move(self)),
      local_regions_(std::move(local_regions)),
      wake_(std::move(wake)),
      socket_(shm_listen(address_)),
      stop_(eventfd(0, EFD_CLOEXEC)),
      thread_([this] { serve(); }) {}

ShmListener::~ShmListener() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void ShmListener::serve() {
  for (;;) {
    pollfd waiting[2] = {{socket_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0 && errno != EINTR) return;
    if (waiting[1].revents != 0) return;
    if (waiting[0].revents == 0) continue;
    Fd peer(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.valid()) continue;
    try {
      auto link = make_shm_link(shm_handshake(std::move(peer), self_, now_ns() + kHandshakeNs),
                                local_regions_);
      const std::lock_guard lock(mutex_);
      accepted_.push_back(std::move(link));
    } catch (const Error& error) {
      fprintf(stderr, "kvtransfer: %s refused a peer: %s\n", self_.name.c_str(), error.what());
      continue;
    }
    wake_();
  }
}

std::vector<std::unique_ptr<Link>> ShmListener::take_accepted() {
  const std::lock_guard lock(mutex_);
  return std::exchange(accepted_, {});
}

std::unique_ptr<Link> ShmListener::connect(const std::string& address, int64_t deadline_ns) const {
  return make_shm_link(shm_handshake(shm_connect(address, deadline_ns), self_, deadline_ns),
                       local_regions_);
}

}  // namespace kvtransfer
