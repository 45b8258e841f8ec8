// Control sockets: what two engines exchange before their link moves bytes, and whose hang-up tells
// that the peer's process has died.
//
// An address is "tcp://HOST:PORT" or a name in the abstract Unix namespace (nothing to clean up in
// a file system). Over TCP anyone who reaches the port can become a peer: bind it to loopback or to
// the fabric's own network. Unix peers must be the same user's.
#pragma once

#include <cstdint>
#include <string>

#include "base/fd.h"

namespace kvtransfer {

enum class SocketKind : uint8_t {
  kPackets,  // SOCK_SEQPACKET, carries descriptors; Unix only
  kStream,
};

// Both throw Error(kInvalidArgument | kIo | kPeerLost | kTimeout).
Fd control_listen(const std::string& address, SocketKind kind);
// Tries again until the deadline while nobody listens.
Fd control_connect(const std::string& address, SocketKind kind, int64_t deadline_ns);
// Throws Error(kMismatch) for a Unix peer of another user.
void check_same_user(const Fd& socket);

// Exact lengths, within the deadline. Throw Error(kPeerLost | kTimeout).
void control_send(const Fd& socket, const void* data, size_t bytes, int64_t deadline_ns);
void control_receive(const Fd& socket, void* data, size_t bytes, int64_t deadline_ns);

}  // namespace kvtransfer
