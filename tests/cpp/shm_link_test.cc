#include "transport/shm_link.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "base/copy.h"
#include "test_support.h"
#include "transport/peer_listener.h"

namespace kvtransfer {
namespace {

using testing::in_seconds;

constexpr size_t kBytes = 1 << 20;

std::shared_ptr<MemoryRegion> region() {
  return std::make_shared<MemoryRegion>(kBytes, RegionKind::kShared, HugePages::kOff);
}

std::string address(const char* name) {
  return "kvt-test-" + std::to_string(getpid()) + "-" + name;
}

// Two ends of one link, in one process.
struct Pair {
  explicit Pair(const char* name)
      : listener(make_shm_listener(address(name), {"b", 2, {remote}}, {remote}, [] {})),
        other(make_shm_listener(address((std::string(name) + "-a").c_str()), {"a", 1, {local}},
                                {local}, [] {})) {
    a = std::move(other->connect(listener->address(), in_seconds(5)).front());
    while (b == nullptr) {
      for (auto& links : listener->take_accepted()) b = std::move(links.front());
    }
  }
  std::shared_ptr<MemoryRegion> local = region(), remote = region();
  std::unique_ptr<PeerListener> listener, other;
  std::unique_ptr<Link> a, b;
};

WorkRequest request(LinkOp op, uint64_t local, uint64_t remote, uint64_t length, uint64_t id) {
  WorkRequest r;
  r.op = op;
  r.signalled = true;
  r.local_offset = local;
  r.remote_offset = remote;
  r.length = length;
  r.wr_id = id;
  return r;
}

TEST(ShmLink, WritesAndReadsMoveTheBytes) {
  Pair pair("rw");
  testing::fill_random(pair.local->data(), kBytes, 1);
  const WorkRequest list[] = {request(LinkOp::kWrite, 0, 4096, 300'000, 1),
                              request(LinkOp::kRead, 500'000, 4096, 300'000, 2)};
  EXPECT_EQ(pair.a->post(list).accepted, 2u);
  WorkCompletion out[4];
  ASSERT_EQ(pair.a->poll(out), 2u);
  EXPECT_EQ(out[0].status, WorkStatus::kSuccess);
  EXPECT_EQ(out[1].wr_id, 2u);
  EXPECT_EQ(memcmp(pair.local->data(), pair.remote->data() + 4096, 300'000), 0);
  EXPECT_EQ(memcmp(pair.local->data(), pair.local->data() + 500'000, 300'000), 0);
  EXPECT_EQ(pair.a->peer(), "b");
  EXPECT_EQ(pair.a->peer_epoch(), 2u);
  EXPECT_EQ(pair.b->peer(), "a");
}

TEST(ShmLink, AnImmediateComesAfterItsBytesAndWakesThePeer) {
  Pair pair("imm");
  std::thread peer([&] {
    for (uint32_t wanted = 1; wanted <= 500; ++wanted) {
      uint32_t got[1];
      while (pair.b->poll_immediates(got) == 0) {
        pollfd ready{pair.b->event_fd(), POLLIN, 0};
        ASSERT_GT(poll(&ready, 1, 5000), 0);
      }
      ASSERT_EQ(got[0], wanted);
      uint32_t value;
      memcpy(&value, pair.remote->data() + wanted * 8, sizeof value);
      ASSERT_EQ(value, wanted * 3);
    }
  });
  for (uint32_t i = 1; i <= 500; ++i) {
    const uint32_t value = i * 3;
    memcpy(pair.local->data() + i * 8, &value, sizeof value);
    WorkRequest r = request(LinkOp::kWriteWithImmediate, i * 8, i * 8, 4, i);
    r.immediate = i;
    ASSERT_EQ(pair.a->post({&r, 1}).accepted, 1u);
    WorkCompletion out[1];
    ASSERT_EQ(pair.a->poll(out), 1u);
  }
  peer.join();
}

TEST(ShmLink, RangesOutsideAnyRegionFailWithoutMovingAByte) {
  const std::vector<WorkRequest> bad = {
      request(LinkOp::kWrite, kBytes - 10, 0, 11, 1),
      request(LinkOp::kWrite, 0, kBytes - 10, 11, 1),
      request(LinkOp::kRead, 0, UINT64_MAX - 4, 8, 1),
      request(LinkOp::kWrite, UINT64_MAX, 0, 2, 1),
  };
  for (size_t i = 0; i < bad.size(); ++i) {
    Pair pair(("bad" + std::to_string(i)).c_str());
    EXPECT_EQ(pair.a->post({&bad[i], 1}).accepted, 1u);
    WorkCompletion out[1];
    ASSERT_EQ(pair.a->poll(out), 1u);
    EXPECT_NE(out[0].status, WorkStatus::kSuccess);
    EXPECT_TRUE(pair.a->failed());
    EXPECT_TRUE(pair.a->drained());
    for (size_t at = 0; at < kBytes; ++at) ASSERT_EQ(pair.remote->data()[at], 0);
  }
  Pair pair("region");
  WorkRequest r = request(LinkOp::kWrite, 0, 0, 8, 1);
  r.remote_region = 3;
  pair.a->post({&r, 1});
  WorkCompletion out[1];
  ASSERT_EQ(pair.a->poll(out), 1u);
  EXPECT_EQ(out[0].status, WorkStatus::kRemoteAccess);
}

TEST(ShmLink, AFullMailboxIsBackPressureNotLoss) {
  Pair pair("full");
  uint32_t sent = 0;
  for (;; ++sent) {
    WorkRequest r = request(LinkOp::kWriteWithImmediate, 0, 0, 0, sent);
    r.immediate = sent;
    r.signalled = false;
    const PostResult result = pair.a->post({&r, 1});
    if (result.accepted == 0) {
      EXPECT_EQ(result.error, ENOMEM);
      break;
    }
    ASSERT_LT(sent, 100'000u);
  }
  uint32_t out[64], expected = 0;
  for (size_t n; (n = pair.b->poll_immediates(out)) > 0;) {
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], expected++);
  }
  EXPECT_EQ(expected, sent);
  EXPECT_FALSE(pair.a->failed());
}

TEST(ShmLink, TheDeathOfThePeerIsNoticedAndPostsAreRefused) {
  const std::string parent_address = address("death");
  const pid_t child = fork();  // before any thread exists: ThreadSanitizer insists
  if (child == 0) {
    auto theirs = region();
    const auto own =
        make_shm_listener(address("death-child"), {"child", 2, {theirs}}, {theirs}, [] {});
    const auto links = own->connect(parent_address, in_seconds(5));
    pause();
    _exit(0);
  }
  auto mine = region();
  const auto listener = make_shm_listener(parent_address, {"parent", 1, {mine}}, {mine}, [] {});
  std::unique_ptr<Link> link;
  const int64_t deadline = in_seconds(10);
  while (link == nullptr && now_ns() < deadline) {
    for (auto& accepted : listener->take_accepted()) link = std::move(accepted.front());
  }
  ASSERT_NE(link, nullptr);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  pollfd ready{link->event_fd(), POLLIN, 0};
  EXPECT_GT(poll(&ready, 1, 5000), 0);
  WorkCompletion out[1];
  link->poll(out);
  EXPECT_TRUE(link->failed());
  const WorkRequest r = request(LinkOp::kWrite, 0, 0, 8, 1);
  EXPECT_EQ(link->post({&r, 1}).error, ECONNRESET);
}

TEST(ShmWire, StrangersAndOtherVersionsAreRefusedWithAReason) {
  const auto handshake_with = [](const std::function<void(int)>& stranger) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    std::thread other([&] { stranger(ends[1]); });
    std::string text;
    try {
      shm_handshake(Fd(ends[0]), {"me", 1, {region()}}, in_seconds(0.5));
    } catch (const Error& error) {
      text = error.what();
    }
    other.join();
    close(ends[1]);
    return text;
  };
  EXPECT_NE(handshake_with([](int fd) { (void)!write(fd, "hello", 5); }).find("none of ours"),
            std::string::npos);
  EXPECT_NE(handshake_with([](int) {}).find("no hello"), std::string::npos);
  ShmHello hello{};
  memcpy(hello.magic, "KVTSHMEM", 8);
  hello.version = 77;
  EXPECT_NE(handshake_with([&](int fd) { (void)!write(fd, &hello, sizeof hello); }).find("77"),
            std::string::npos);
  hello.version = kShmVersion;
  hello.num_regions = 5;
  EXPECT_NE(
      handshake_with([&](int fd) { (void)!write(fd, &hello, sizeof hello); }).find("descriptors"),
      std::string::npos);
  hello.num_regions = UINT32_MAX;
  EXPECT_NE(
      handshake_with([&](int fd) { (void)!write(fd, &hello, sizeof hello); }).find("descriptors"),
      std::string::npos);
}

TEST(CopyBytes, CopiesEveryLengthAndAlignment) {
  std::vector<uint8_t> from(20'000), to(20'000), wanted;
  testing::fill_random(from.data(), from.size(), 4);
  std::mt19937 random(4);
  for (int round = 0; round < 500; ++round) {
    const size_t a = random() % 200, b = random() % 200, n = random() % 19'000;
    std::fill(to.begin(), to.end(), 0xAB);
    wanted = to;
    memcpy(wanted.data() + b, from.data() + a, n);
    copy_bytes(to.data() + b, from.data() + a, n);
    ASSERT_EQ(to, wanted) << a << " " << b << " " << n;
  }
}

}  // namespace
}  // namespace kvtransfer
