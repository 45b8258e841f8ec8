#include "transport/peer_listener.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "transport/shm_link.h"
#include "transport/verbs/handshake.h"

namespace kvtransfer {

namespace {
constexpr int64_t kHandshakeNs = 5'000'000'000;
}

PeerListener::PeerListener(std::string address, SocketKind kind, Handshake handshake,
                           std::function<void()> wake)
    : address_(std::move(address)),
      kind_(kind),
      handshake_(std::move(handshake)),
      wake_(std::move(wake)),
      socket_(control_listen(address_, kind_)),
      stop_(eventfd(0, EFD_CLOEXEC)),
      thread_([this] { serve(); }) {}

PeerListener::~PeerListener() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void PeerListener::serve() {
  for (;;) {
    pollfd waiting[2] = {{socket_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0 && errno != EINTR) return;
    if (waiting[1].revents != 0) return;
    if (waiting[0].revents == 0) continue;
    Fd peer(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer.valid()) continue;
    try {
      check_same_user(peer);
      PeerLinks links = handshake_(std::move(peer), now_ns() + kHandshakeNs);
      const std::lock_guard lock(mutex_);
      accepted_.push_back(std::move(links));
    } catch (const Error& error) {
      fprintf(stderr, "kvtransfer: %s refused a peer: %s\n", address_.c_str(), error.what());
      continue;
    }
    wake_();
  }
}

std::vector<PeerLinks> PeerListener::take_accepted() {
  const std::lock_guard lock(mutex_);
  return std::exchange(accepted_, {});
}

PeerLinks PeerListener::connect(const std::string& address, int64_t deadline_ns) const {
  Fd socket = control_connect(address, kind_, deadline_ns);
  check_same_user(socket);
  return handshake_(std::move(socket), deadline_ns);
}

std::unique_ptr<PeerListener> make_shm_listener(
    std::string address, ShmIdentity self, std::vector<std::shared_ptr<MemoryRegion>> local_regions,
    std::function<void()> wake) {
  auto handshake = [self = std::move(self), local = std::move(local_regions)](Fd socket,
                                                                              int64_t deadline_ns) {
    PeerLinks links;
    links.push_back(make_shm_link(shm_handshake(std::move(socket), self, deadline_ns), local));
    return links;
  };
  return std::make_unique<PeerListener>(std::move(address), SocketKind::kPackets,
                                        std::move(handshake), std::move(wake));
}

std::unique_ptr<PeerListener> make_verbs_listener(std::string address,
                                                  std::shared_ptr<VerbsDomain> domain,
                                                  std::string name, uint64_t epoch,
                                                  std::function<void()> wake) {
  auto handshake = [domain = std::move(domain), name = std::move(name), epoch](
                       Fd socket, int64_t deadline_ns) {
    return verbs_handshake(*domain, name, epoch, std::move(socket), deadline_ns);
  };
  return std::make_unique<PeerListener>(std::move(address), SocketKind::kStream,
                                        std::move(handshake), std::move(wake));
}

}  // namespace kvtransfer
