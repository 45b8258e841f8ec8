#include "transport/control_socket.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "base/clock.h"
#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

constexpr std::string_view kTcp = "tcp://";

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address unix_address(const std::string& name) {
  Address out;
  auto& address = reinterpret_cast<sockaddr_un&>(out.storage);
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof address.sun_path) {
    throw Error(ErrorCode::kInvalidArgument, "control socket: bad address '" + name + "'");
  }
  memcpy(address.sun_path + 1, name.data(), name.size());  // leading zero byte: abstract
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

Address tcp_address(const std::string& text) {
  const std::string rest = text.substr(kTcp.size());
  const size_t colon = rest.rfind(':');
  std::string host = rest.substr(0, colon == std::string::npos ? 0 : colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = host.empty()
                        ? EAI_NONAME
                        : getaddrinfo(host.c_str(), rest.substr(colon + 1).c_str(), &hints, &found);
  if (error != 0) {
    throw Error(ErrorCode::kInvalidArgument, "control socket: bad address '" + text +
                                                 "' (tcp://HOST:PORT): " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  Address out;
  memcpy(&out.storage, found->ai_addr, found->ai_addrlen);
  out.length = found->ai_addrlen;
  return out;
}

Address resolve(const std::string& address, SocketKind kind) {
  if (!address.starts_with(kTcp)) return unix_address(address);
  if (kind == SocketKind::kPackets) {
    throw Error(ErrorCode::kInvalidArgument,
                "control socket: " + address + " can't hand over memory; shm needs a Unix name");
  }
  return tcp_address(address);
}

Fd make_socket(const Address& address, SocketKind kind) {
  const int type = kind == SocketKind::kPackets ? SOCK_SEQPACKET : SOCK_STREAM;
  Fd socket(::socket(address.storage.ss_family, type | SOCK_CLOEXEC, 0));
  if (!socket.valid()) throw Error(ErrorCode::kIo, "control socket", errno);
  return socket;
}

void wait_for(const Fd& socket, short events, int64_t deadline_ns) {
  pollfd ready{socket.get(), events, 0};
  const int64_t left_ms = std::clamp<int64_t>((deadline_ns - now_ns()) / 1'000'000, 0, 60'000);
  if (poll(&ready, 1, static_cast<int>(left_ms)) <= 0) {
    throw Error(ErrorCode::kTimeout, "control socket: the peer said nothing in time");
  }
}

}  // namespace

Fd control_listen(const std::string& address, SocketKind kind) {
  const Address target = resolve(address, kind);
  Fd socket = make_socket(target, kind);
  const int one = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(socket.get(), target.get(), target.length) != 0 || listen(socket.get(), 64) != 0) {
    throw Error(ErrorCode::kIo, "control socket: listening at " + address, errno);
  }
  return socket;
}

Fd control_connect(const std::string& address, SocketKind kind, int64_t deadline_ns) {
  const Address target = resolve(address, kind);
  for (;;) {
    Fd socket = make_socket(target, kind);
    if (connect(socket.get(), target.get(), target.length) == 0) return socket;
    const int error = errno;
    if (now_ns() >= deadline_ns || (error != ECONNREFUSED && error != EAGAIN && error != EINTR)) {
      throw Error(ErrorCode::kPeerLost, "control socket: connecting to " + address, error);
    }
    const timespec pause{0, 5'000'000};
    nanosleep(&pause, nullptr);
  }
}

void check_same_user(const Fd& socket) {
  sockaddr_storage own{};
  socklen_t own_length = sizeof own;
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &own_length);
  if (own.ss_family != AF_UNIX) return;
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 ||
      peer.uid != geteuid()) {
    throw Error(ErrorCode::kMismatch, "control socket: the peer belongs to another user");
  }
}

void control_send(const Fd& socket, const void* data, size_t bytes, int64_t deadline_ns) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    wait_for(socket, POLLOUT, deadline_ns);
    const ssize_t n = send(socket.get(), at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) throw Error(ErrorCode::kPeerLost, "control socket: sending to the peer", errno);
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

void control_receive(const Fd& socket, void* data, size_t bytes, int64_t deadline_ns) {
  auto* at = static_cast<uint8_t*>(data);
  while (bytes > 0) {
    wait_for(socket, POLLIN, deadline_ns);
    const ssize_t n = recv(socket.get(), at, bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n < 0) throw Error(ErrorCode::kPeerLost, "control socket: receiving from the peer", errno);
    if (n == 0) throw Error(ErrorCode::kPeerLost, "control socket: the peer closed the connection");
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace kvtransfer
