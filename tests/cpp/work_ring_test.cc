#include "kvtransfer/work_ring.h"

#include <errno.h>

#include <map>

#include "scripted_link.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::ScriptedLink;

WorkRequest write_of(uint64_t bytes, uint64_t offset = 0) {
  WorkRequest request;
  request.length = bytes;
  request.local_offset = offset;
  request.remote_offset = 7 + offset;
  request.remote_region = 3;
  return request;
}

std::vector<Retired> poll_all(WorkRing& ring) {
  std::vector<Retired> all;
  Retired out[8];
  for (size_t n; (n = ring.poll(out)) > 0;) all.insert(all.end(), out, out + n);
  return all;
}

TEST(WorkRing, AWholeBatchGoesOutWithOneDoorbell) {
  ScriptedLink link({256, 1 << 20, true});
  WorkRing ring(link, {.batch = 32});
  for (uint64_t i = 0; i < 32; ++i) ASSERT_TRUE(ring.post(write_of(10), i));
  ASSERT_EQ(link.posts.size(), 1u);
  EXPECT_EQ(link.posts[0].size(), 32u);
  EXPECT_EQ(ring.counters().doorbells, 1u);
  for (uint64_t i = 0; i < 5; ++i) ring.post(write_of(10), i);
  EXPECT_EQ(link.posts.size(), 1u) << "below the batch nothing is rung";
  EXPECT_TRUE(ring.doorbell());
  EXPECT_EQ(link.posts.size(), 2u);
}

TEST(WorkRing, SignalsEveryIntervalAndTheLastAndRetiresEverythingBefore) {
  ScriptedLink link({64, 1 << 20, true});
  WorkRing ring(link, {.batch = 64, .signal_interval = 8});
  for (uint64_t i = 0; i < 20; ++i) ring.post(write_of(10), 100 + i);
  ring.doorbell();
  std::vector<size_t> signalled;
  for (size_t i = 0; i < 20; ++i) {
    if (link.posts[0][i].signalled) signalled.push_back(i);
  }
  EXPECT_EQ(signalled, (std::vector<size_t>{7, 15, 19}));
  link.complete(8);
  auto retired = poll_all(ring);
  ASSERT_EQ(retired.size(), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(retired[i].cookie, 100 + i);
  link.complete(12);
  EXPECT_EQ(poll_all(ring).size(), 12u);
  EXPECT_EQ(ring.outstanding(), 0u);
}

// Invariant 1: whatever the pattern of posts and doorbells, the queue can never fill up with
// requests of which none is signalled.
TEST(WorkRing, EverySendQueueDepthHoldsASignalledRequest) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const uint32_t depth = 1 + random() % 24;
    ScriptedLink link({depth, 1 << 20, true});
    WorkRing ring(link, {.capacity = 500,
                         .batch = 1 + static_cast<uint32_t>(random() % 40),
                         .signal_interval = 1 + static_cast<uint32_t>(random() % 64)});
    uint64_t posted = 0, retired = 0;
    for (int i = 0; i < 100; ++i) {
      for (uint32_t n = random() % 6; n > 0; --n) posted += ring.post(write_of(1), posted);
      if (random() % 4 == 0) {  // a full queue refuses part of the next list
        link.answers.push_back({static_cast<size_t>(random() % 4), ENOMEM});
      }
      if (random() % 2) ring.doorbell();
      ASSERT_LE(link.accepted.size(), depth);
      if (random() % 3 == 0) link.complete(random() % (depth + 1));
      retired += poll_all(ring).size();
    }
    for (int i = 0; i < 500 && retired < posted; ++i) {  // must drain without further posts
      ring.doorbell();
      link.complete(depth);
      retired += poll_all(ring).size();
    }
    ASSERT_EQ(retired, posted) << "round " << round << " depth " << depth;
  }
}

TEST(WorkRing, BackPressureResumesAtExactlyTheRefusedRequest) {
  ScriptedLink link({64, 1 << 20, true});
  WorkRing ring(link, {.batch = 64});
  for (uint64_t i = 0; i < 10; ++i) ring.post(write_of(10), i);
  link.answers = {{4, ENOMEM}};
  EXPECT_FALSE(ring.doorbell());
  EXPECT_EQ(ring.counters().back_pressure, 1u);
  EXPECT_TRUE(ring.doorbell());
  ASSERT_EQ(link.posts.size(), 2u);
  EXPECT_EQ(link.posts[1].front().wr_id, 4u);
  EXPECT_EQ(link.posts[1].size(), 6u);
  link.complete(10);
  EXPECT_EQ(poll_all(ring).size(), 10u);
  EXPECT_FALSE(ring.failed());
}

TEST(WorkRing, TheFirstBadCompletionIsTheRootCauseAndTheRestIsFlushedAfterTheDrain) {
  ScriptedLink link({64, 1 << 20, true});
  WorkRing ring(link, {.batch = 64, .signal_interval = 2});
  for (uint64_t i = 0; i < 10; ++i) ring.post(write_of(100 + i, i * 1000), i);
  ring.doorbell();
  link.drain_allowed = false;
  link.break_at(4, WorkStatus::kRemoteAccess, 0x89);
  auto retired = poll_all(ring);
  EXPECT_TRUE(ring.failed());
  for (const Retired& r : retired) EXPECT_EQ(r.status, WorkStatus::kSuccess);
  EXPECT_LE(retired.size(), 4u) << "nothing is flushed before the drain";
  const std::string text = ring.failure().text;
  for (const char* part : {"write 4", "scripted-peer", "remote access", "offset 4000",
                           "offset 4007", "104 bytes", "137", "region 3"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
  }
  link.drain_allowed = true;
  const auto rest = poll_all(ring);
  EXPECT_EQ(retired.size() + rest.size(), 10u);
  EXPECT_EQ(rest.back().status, WorkStatus::kFlushed);
  EXPECT_EQ(ring.failure().text, text) << "flushes are secondary";
  EXPECT_FALSE(ring.post(write_of(1), 99));
}

TEST(WorkRing, AHardPostErrorTakesTheLinkDownAndRetiresEverythingOnce) {
  ScriptedLink link({64, 1 << 20, true});
  WorkRing ring(link, {.batch = 64});
  for (uint64_t i = 0; i < 6; ++i) ring.post(write_of(10), i);
  link.answers = {{2, EINVAL}};  // half-accepted, its tail unsignalled
  ring.doorbell();
  EXPECT_TRUE(ring.failed());
  EXPECT_TRUE(link.failed());
  std::map<uint64_t, int> seen;
  for (const Retired& r : poll_all(ring)) ++seen[r.cookie];
  EXPECT_EQ(seen.size(), 6u);
  for (const auto& [cookie, times] : seen) EXPECT_EQ(times, 1) << cookie;
}

TEST(WorkRing, UnorderedLinksAreSignalledThroughoutAndCounted) {
  ScriptedLink link({16, 1 << 20, false});
  WorkRing ring(link, {.batch = 64});
  for (uint64_t i = 0; i < 6; ++i) ring.post(write_of(10), i);
  ring.doorbell();
  for (const WorkRequest& r : link.accepted) EXPECT_TRUE(r.signalled);
  link.say({5, WorkStatus::kSuccess});
  link.say({1, WorkStatus::kSuccess});
  EXPECT_EQ(poll_all(ring).size(), 0u) << "retired in order of posting";
  link.say({0, WorkStatus::kSuccess});
  EXPECT_EQ(poll_all(ring).size(), 2u);
  for (const uint64_t id : {4, 3, 2}) link.say({id, WorkStatus::kSuccess});
  EXPECT_EQ(poll_all(ring).size(), 4u);
}

TEST(WorkRing, CompletionsThatNobodyAwaitsAreIgnored) {
  ScriptedLink link({16, 1 << 20, true});
  WorkRing ring(link);
  link.say({12345, WorkStatus::kSuccess});
  ring.post(write_of(10), 1);
  ring.doorbell();
  link.complete(1);
  EXPECT_EQ(poll_all(ring).size(), 1u);
  link.say({0, WorkStatus::kRemoteAccess});  // told twice
  EXPECT_EQ(poll_all(ring).size(), 0u);
  EXPECT_FALSE(ring.failed());
}

TEST(WorkRing, LongMessagesAreSplitAndOnlyTheLastPieceCarriesTheImmediate) {
  ScriptedLink link({64, 100, true});
  WorkRing ring(link, {.batch = 64});
  WorkRequest request = write_of(250);
  request.op = LinkOp::kWriteWithImmediate;
  request.immediate = 5;
  EXPECT_EQ(ring.entries_for(250), 3u);
  ASSERT_TRUE(ring.post(request, 1));
  ring.doorbell();
  ASSERT_EQ(link.posts[0].size(), 3u);
  EXPECT_EQ(link.posts[0][0].op, LinkOp::kWrite);
  EXPECT_EQ(link.posts[0][1].local_offset, 100u);
  EXPECT_EQ(link.posts[0][1].remote_offset, 107u);
  EXPECT_EQ(link.posts[0][2].op, LinkOp::kWriteWithImmediate);
  EXPECT_EQ(link.posts[0][2].length, 50u);
  link.complete(3);
  EXPECT_EQ(poll_all(ring).size(), 3u);
}

TEST(WorkRing, AFullRingRefusesAWholeRequestAndTakesItLater) {
  ScriptedLink link({4, 100, true});
  WorkRing ring(link, {.capacity = 4, .batch = 4});
  ASSERT_TRUE(ring.post(write_of(250), 1));
  EXPECT_FALSE(ring.post(write_of(150), 2)) << "needs two entries, one is free";
  EXPECT_EQ(ring.outstanding(), 3u);
  ring.doorbell();
  link.complete(3);
  poll_all(ring);
  EXPECT_TRUE(ring.post(write_of(150), 2));
}

TEST(WorkRing, APeerThatGoesAwayFailsTheRingEvenWithoutACompletion) {
  ScriptedLink link({16, 100, true});
  WorkRing ring(link, {.batch = 16});
  ring.post(write_of(10), 1);
  link.fail();
  const auto retired = poll_all(ring);
  ASSERT_EQ(retired.size(), 1u);
  EXPECT_EQ(retired[0].status, WorkStatus::kFlushed);
  EXPECT_EQ(ring.failure().code, ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace kvtransfer
