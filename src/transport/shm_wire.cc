#include "transport/shm_wire.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "base/clock.h"
#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

constexpr char kMagic[8] = {'K', 'V', 'T', 'S', 'H', 'M', 'E', 'M'};
constexpr size_t kMaxDescriptors = 2 + kShmMaxRegions;

void send_hello(int socket, const ShmIdentity& self, int inbox_fd, int event_fd) {
  ShmHello hello{};
  memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.version = kShmVersion;
  hello.num_regions = static_cast<uint32_t>(self.regions.size());
  hello.epoch = self.epoch;
  memcpy(hello.name, self.name.data(), std::min(self.name.size(), sizeof hello.name - 1));
  std::vector<int> descriptors = {inbox_fd, event_fd};
  for (size_t i = 0; i < self.regions.size(); ++i) {
    hello.region_bytes[i] = self.regions[i]->bytes();
    descriptors.push_back(self.regions[i]->fd());
  }
  iovec data{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors.size());
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * descriptors.size());
  memcpy(CMSG_DATA(header), descriptors.data(), sizeof(int) * descriptors.size());
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello)) {
    throw Error(ErrorCode::kPeerLost, "shm: sending hello", errno);
  }
}

std::vector<Fd> take_descriptors(msghdr& message) {
  std::vector<Fd> taken;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      taken.emplace_back(fd);
    }
  }
  return taken;
}

ShmHello receive_hello(int socket, std::vector<Fd>& descriptors, int64_t deadline_ns) {
  pollfd ready{socket, POLLIN, 0};
  const int64_t left_ms = std::max<int64_t>((deadline_ns - now_ns()) / 1'000'000, 0);
  if (poll(&ready, 1, static_cast<int>(std::min<int64_t>(left_ms, 60'000))) <= 0) {
    throw Error(ErrorCode::kTimeout, "shm: no hello from the peer");
  }
  ShmHello hello{};
  iovec data{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (n == 0) throw Error(ErrorCode::kPeerLost, "shm: the peer closed before its hello");
  if (n < 0) throw Error(ErrorCode::kPeerLost, "shm: receiving hello", errno);
  descriptors = take_descriptors(message);
  hello.name[sizeof hello.name - 1] = '\0';
  if (n != static_cast<ssize_t>(sizeof hello) || memcmp(hello.magic, kMagic, sizeof kMagic) != 0) {
    throw Error(ErrorCode::kMismatch, "shm: the peer's hello is none of ours");
  }
  if (hello.version != kShmVersion) {
    throw Error(ErrorCode::kMismatch, "shm: the peer speaks version " +
                                          std::to_string(hello.version) + ", we speak " +
                                          std::to_string(kShmVersion));
  }
  if (hello.num_regions > kShmMaxRegions || descriptors.size() != 2 + hello.num_regions) {
    throw Error(ErrorCode::kMismatch, "shm: the peer's hello names " +
                                          std::to_string(hello.num_regions) + " regions but has " +
                                          std::to_string(descriptors.size()) + " descriptors");
  }
  return hello;
}

}  // namespace

ShmPeer shm_handshake(Fd socket, const ShmIdentity& self, int64_t deadline_ns) {
  if (self.regions.size() > kShmMaxRegions) {
    throw Error(ErrorCode::kInvalidArgument, "shm: at most 8 regions");
  }
  MemoryRegion inbox(sizeof(Mailbox), RegionKind::kShared, HugePages::kOff);
  Fd inbox_event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  send_hello(socket.get(), self, inbox.fd(), inbox_event.get());
  std::vector<Fd> descriptors;
  const ShmHello hello = receive_hello(socket.get(), descriptors, deadline_ns);
  std::vector<MemoryRegion> regions;
  for (uint32_t i = 0; i < hello.num_regions; ++i) {
    regions.push_back(MemoryRegion::map_peer(descriptors[2 + i].get(), hello.region_bytes[i]));
  }
  return {std::move(socket),
          hello.name,
          hello.epoch,
          std::move(regions),
          std::move(inbox),
          MemoryRegion::map_peer(descriptors[0].get(), sizeof(Mailbox)),
          std::move(inbox_event),
          std::move(descriptors[1])};
}

}  // namespace kvtransfer
