// Two processes over shm at full tilt: random writes, reads and immediates, every byte checked.
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "kvtransfer/work_ring.h"
#include "test_support.h"
#include "transport/peer_listener.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

constexpr size_t kRegionBytes = 1 << 20;
constexpr size_t kCellBytes = 4096;
constexpr uint32_t kCells = kRegionBytes / kCellBytes;

std::shared_ptr<MemoryRegion> make_region() {
  return std::make_shared<MemoryRegion>(kRegionBytes, RegionKind::kShared, HugePages::kOff);
}

// What cell `cell` holds in round `round`: both processes can compute it.
void fill_cell(uint8_t* at, uint32_t cell, uint32_t round) {
  std::mt19937_64 random(uint64_t{round} << 32 | cell);
  for (size_t i = 0; i < kCellBytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(at + i, &word, sizeof word);
  }
}

bool cell_holds(const uint8_t* at, uint32_t cell, uint32_t round) {
  std::vector<uint8_t> wanted(kCellBytes);
  fill_cell(wanted.data(), cell, round);
  return std::memcmp(at, wanted.data(), kCellBytes) == 0;
}

// Answers every immediate (round, cell) by checking that the cell arrived, then by sending it back.
int echo(const std::string& address, uint32_t rounds) {
  auto region = make_region();
  const auto own = make_shm_listener(address + "-child", {"child", 2, {region}}, {region}, [] {});
  const auto links = own->connect(address, in_seconds(10));
  const auto& link = links.front();
  WorkRing ring(*link);
  for (uint32_t done = 0; done < rounds;) {
    uint32_t immediates[32];
    const size_t n = link->poll_immediates(immediates);
    if (n == 0) {
      pollfd ready{link->event_fd(), POLLIN, 0};
      if (poll(&ready, 1, 10'000) <= 0) return 2;
      continue;
    }
    for (size_t i = 0; i < n; ++i, ++done) {
      const uint32_t cell = immediates[i] % kCells, round = immediates[i] / kCells;
      if (!cell_holds(region->data() + cell * kCellBytes, cell, round)) return 3;
      WorkRequest answer;
      answer.op = LinkOp::kWriteWithImmediate;
      answer.local_offset = answer.remote_offset = cell * kCellBytes;
      answer.length = kCellBytes;
      answer.immediate = immediates[i];
      if (!ring.post(answer, 1)) return 4;
    }
    ring.doorbell();
    Retired retired[64];
    while (ring.poll(retired) > 0) {
    }
    if (ring.failed()) return 5;
  }
  // The parent closes when it has checked everything.
  for (WorkCompletion out[1]; !link->failed(); link->poll(out)) usleep(1000);
  return 0;
}

TEST(ShmProcesses, EveryCellComesBackAsItWasSentInOrder) {
  const std::string address = "kvt-echo-" + std::to_string(getpid());
  constexpr uint32_t kRounds = 4000;
  const pid_t child = fork();
  if (child == 0) _exit(echo(address, kRounds));
  auto region = make_region();
  std::unique_ptr<Link> link;
  {
    const auto listener = make_shm_listener(address, {"parent", 1, {region}}, {region}, [] {});
    const int64_t deadline = in_seconds(10);
    while (link == nullptr && now_ns() < deadline) {
      for (auto& accepted : listener->take_accepted()) link = std::move(accepted.front());
    }
    ASSERT_NE(link, nullptr);
  }
  WorkRing ring(*link, {.batch = 8});
  uint32_t sent = 0, received = 0;
  const int64_t deadline = in_seconds(60);
  while (received < kRounds && now_ns() < deadline) {
    // A cell is reused only after it came back.
    while (sent < kRounds && sent - received < kCells / 2) {
      const uint32_t cell = sent % kCells, round = sent / kCells;
      fill_cell(region->data() + cell * kCellBytes, cell, round);
      WorkRequest request;
      request.op = LinkOp::kWriteWithImmediate;
      request.local_offset = request.remote_offset = cell * kCellBytes;
      request.length = kCellBytes;
      request.immediate = sent;
      if (!ring.post(request, sent)) break;
      ++sent;
    }
    ring.doorbell();
    Retired retired[64];
    while (ring.poll(retired) > 0) {
    }
    ASSERT_FALSE(ring.failed()) << ring.failure().text;
    uint32_t immediates[64];
    const size_t n = link->poll_immediates(immediates);
    for (size_t i = 0; i < n; ++i, ++received) {
      ASSERT_EQ(immediates[i], received) << "an ordered link keeps the order";
      const uint32_t cell = received % kCells;
      ASSERT_TRUE(cell_holds(region->data() + cell * kCellBytes, cell, received / kCells));
    }
  }
  EXPECT_EQ(received, kRounds);
  EXPECT_LT(ring.counters().doorbells, ring.counters().work_requests);
  link.reset();
  int status;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ShmProcesses, ReadsOfALivingPeersMemorySeeItsLatestPublishedBytes) {
  const std::string address = "kvt-read-" + std::to_string(getpid());
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto region = make_region();
    const auto own = make_shm_listener(address + "-child", {"child", 2, {region}}, {region}, [] {});
    const auto links = own->connect(address, in_seconds(10));
    Link* link = links.front().get();
    for (uint32_t round = 0; round < 200; ++round) {
      const uint32_t cell = round % kCells;
      fill_cell(region->data() + cell * kCellBytes, cell, round);
      WorkRequest notice;
      notice.op = LinkOp::kWriteWithImmediate;
      notice.immediate = round;
      if (link->post({&notice, 1}).accepted != 1) _exit(2);
    }
    char byte;
    _exit(read(pipes[0], &byte, 1) == 1 ? 0 : 3);
  }
  auto region = make_region();
  const auto listener = make_shm_listener(address, {"parent", 1, {region}}, {region}, [] {});
  std::unique_ptr<Link> link;
  const int64_t deadline = in_seconds(10);
  while (link == nullptr && now_ns() < deadline) {
    for (auto& accepted : listener->take_accepted()) link = std::move(accepted.front());
  }
  ASSERT_NE(link, nullptr);
  uint32_t next = 0;
  while (next < 200 && now_ns() < deadline) {
    uint32_t immediates[16];
    const size_t n = link->poll_immediates(immediates);
    for (size_t i = 0; i < n; ++i, ++next) {
      ASSERT_EQ(immediates[i], next);
      const uint32_t cell = next % kCells;
      WorkRequest request;
      request.op = LinkOp::kRead;
      request.signalled = true;
      request.local_offset = 0;
      request.remote_offset = cell * kCellBytes;
      request.length = kCellBytes;
      ASSERT_EQ(link->post({&request, 1}).accepted, 1u);
      WorkCompletion out[1];
      ASSERT_EQ(link->poll(out), 1u);
      ASSERT_EQ(out[0].status, WorkStatus::kSuccess);
      ASSERT_TRUE(cell_holds(region->data(), cell, next)) << "round " << next;
    }
  }
  EXPECT_EQ(next, 200u);
  ASSERT_EQ(write(pipes[1], "x", 1), 1);
  int status;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace kvtransfer
