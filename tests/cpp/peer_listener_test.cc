// The listener with handshakes of the test's own: silent, refusing and slow peers hold nobody up.
#include "transport/peer_listener.h"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>

#include "scripted_link.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::in_seconds;
using testing::ScriptedLink;

std::string address(const char* name) {
  return "kvt-listener-" + std::to_string(getpid()) + "-" + name;
}

PeerLinks one_link() {
  PeerLinks links;
  links.push_back(std::make_unique<ScriptedLink>(LinkLimits{8, 8, true}));
  return links;
}

// Says one byte and wants one: 'y' makes a link.
PeerLinks say_and_hear(const Fd& socket, char say, int64_t deadline_ns) {
  control_send(socket, &say, 1, deadline_ns);
  char heard = 0;
  control_receive(socket, &heard, 1, deadline_ns);
  if (heard != 'y') throw Error(ErrorCode::kMismatch, "heard no 'y'");
  return one_link();
}

size_t wait_accepted(PeerListener& listener, size_t wanted) {
  size_t got = 0;
  for (const int64_t deadline = in_seconds(10); got < wanted && now_ns() < deadline;) {
    for (const auto& links : listener.take_accepted()) got += links.size();
  }
  return got;
}

TEST(PeerListener, BothSidesRunTheSameHandshake) {
  std::atomic<int> rung{0};
  const auto handshake = [](Fd socket, int64_t deadline_ns) {
    return say_and_hear(socket, 'y', deadline_ns);
  };
  PeerListener a(address("a"), SocketKind::kStream, handshake, [&] { ++rung; });
  PeerListener b(address("b"), SocketKind::kStream, handshake, [] {});
  EXPECT_EQ(b.connect(a.address(), in_seconds(5)).size(), 1u);
  EXPECT_EQ(wait_accepted(a, 1), 1u);
  EXPECT_EQ(rung.load(), 1);
}

TEST(PeerListener, ARefusedPeerIsDroppedAndTheNextIsServed) {
  const auto polite = [](Fd socket, int64_t deadline_ns) {
    return say_and_hear(socket, 'y', deadline_ns);
  };
  const auto rude = [](Fd socket, int64_t deadline_ns) {
    return say_and_hear(socket, 'n', deadline_ns);
  };
  PeerListener listener(address("c"), SocketKind::kStream, polite, [] {});
  PeerListener stranger(address("d"), SocketKind::kStream, rude, [] {});
  PeerListener guest(address("e"), SocketKind::kStream, polite, [] {});
  // The stranger hears a 'y' before it learns that nobody wants it.
  (void)stranger.connect(listener.address(), in_seconds(5));
  EXPECT_EQ(guest.connect(listener.address(), in_seconds(5)).size(), 1u);
  EXPECT_EQ(wait_accepted(listener, 1), 1u);
}

TEST(PeerListener, ASilentPeerEndsTheHandshakeAtItsDeadline) {
  const auto quick = [](Fd socket, int64_t) { return say_and_hear(socket, 'y', in_seconds(0.05)); };
  PeerListener listener(address("f"), SocketKind::kStream, quick, [] {});
  const Fd silent = control_connect(listener.address(), SocketKind::kStream, in_seconds(5));
  PeerListener guest(
      address("g"), SocketKind::kStream,
      [](Fd socket, int64_t deadline_ns) { return say_and_hear(socket, 'y', deadline_ns); }, [] {});
  EXPECT_EQ(guest.connect(listener.address(), in_seconds(10)).size(), 1u);
  EXPECT_EQ(wait_accepted(listener, 1), 1u);
}

TEST(PeerListener, AnAddressInUseIsAnErrorAndDestructionNeverHangs) {
  const auto nobody = [](Fd, int64_t) -> PeerLinks {
    throw Error(ErrorCode::kCancelled, "nobody");
  };
  PeerListener first(address("h"), SocketKind::kPackets, nobody, [] {});
  EXPECT_THROW(PeerListener(address("h"), SocketKind::kPackets, nobody, [] {}), Error);
  for (int round = 0; round < 50; ++round) {
    PeerListener listener(address("i"), SocketKind::kPackets, nobody, [] {});
    if (round % 2 == 0) {
      const Fd caller = control_connect(listener.address(), SocketKind::kPackets, in_seconds(5));
    }
  }
}

}  // namespace
}  // namespace kvtransfer
