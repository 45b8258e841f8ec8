#include "transport/control_socket.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::in_seconds;

ErrorCode code_of(const std::function<void()>& attempt) {
  try {
    attempt();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kNone;
}

std::string unix_name(const char* name) {
  return "kvt-control-" + std::to_string(getpid()) + "-" + name;
}

TEST(ControlSocket, ExactLengthsArriveOverUnixAndTcp) {
  const std::string tcp = "tcp://127.0.0.1:" + std::to_string(20000 + getpid() % 20000);
  for (const std::string& address : {unix_name("exact"), tcp}) {
    const Fd listener = control_listen(address, SocketKind::kStream);
    std::vector<uint8_t> sent(300'000), received(sent.size());
    testing::fill_random(sent.data(), sent.size(), 4);
    std::thread other([&] {
      const Fd socket = control_connect(address, SocketKind::kStream, in_seconds(5));
      control_send(socket, sent.data(), sent.size(), in_seconds(5));
    });
    const Fd peer(accept(listener.get(), nullptr, nullptr));
    check_same_user(peer);
    control_receive(peer, received.data(), received.size(), in_seconds(5));
    other.join();
    EXPECT_EQ(received, sent) << address;
    uint8_t byte;
    EXPECT_EQ(code_of([&] { control_receive(peer, &byte, 1, in_seconds(5)); }),
              ErrorCode::kPeerLost);
  }
}

TEST(ControlSocket, ASilentPeerEndsAtTheDeadline) {
  const std::string address = unix_name("silent");
  const Fd listener = control_listen(address, SocketKind::kStream);
  const Fd socket = control_connect(address, SocketKind::kStream, in_seconds(5));
  uint8_t byte;
  EXPECT_EQ(code_of([&] { control_receive(socket, &byte, 1, in_seconds(0.05)); }),
            ErrorCode::kTimeout);
}

TEST(ControlSocket, ConnectingToNobodyEndsAtTheDeadline) {
  const std::string address = unix_name("nobody");
  for (const SocketKind kind : {SocketKind::kPackets, SocketKind::kStream}) {
    EXPECT_EQ(code_of([&] { control_connect(address, kind, in_seconds(0.05)); }),
              ErrorCode::kPeerLost);
  }
  EXPECT_EQ(
      code_of([&] { control_connect("tcp://127.0.0.1:1", SocketKind::kStream, in_seconds(0.05)); }),
      ErrorCode::kPeerLost);
}

TEST(ControlSocket, AddressesThatCanNotBeAreRefused) {
  for (const std::string& address :
       {std::string(), std::string(200, 'x'), std::string("tcp://"), std::string("tcp://:"),
        std::string("tcp://127.0.0.1:x"), std::string("tcp://[::1")}) {
    EXPECT_EQ(code_of([&] { control_listen(address, SocketKind::kStream); }),
              ErrorCode::kInvalidArgument)
        << address;
  }
  EXPECT_EQ(code_of([&] { control_listen("tcp://127.0.0.1:5", SocketKind::kPackets); }),
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvtransfer
