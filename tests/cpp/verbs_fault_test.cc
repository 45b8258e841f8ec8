// What can go wrong with a queue pair, and that it ends with one root cause, nothing delivered
// wrongly, everything retired and all memory given back.
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "engine_fixture.h"
#include "transport/peer_listener.h"
#include "verbs_fixture.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

// Changes the machine's devices; only where that can't hurt.
bool command(const std::string& text) {
  return system((text + " > /dev/null 2>&1").c_str()) == 0;
}

// Packets to the peer go to nobody, as if its machine had lost power; or find it again.
bool silence(bool silent) {
  return command(std::string("ip neigh replace 10.77.0.2 lladdr 02:00:00:77:00:") +
                 (silent ? "99" : "02") + " dev v0 nud permanent");
}

class VerbsFaultTest : public BreakableDevices {
 protected:
  struct Tally {
    size_t done = 0, bad = 0, flushed = 0;
  };
  static Tally tally(const std::vector<Retired>& all) {
    Tally out;
    for (const Retired& r : all) {
      out.done += r.status == WorkStatus::kSuccess;
      out.flushed += r.status == WorkStatus::kFlushed;
      out.bad += r.status != WorkStatus::kSuccess && r.status != WorkStatus::kFlushed;
    }
    return out;
  }
  // Posts good, `bad`, good requests; the bad one must be the root cause and the last ones flush.
  static void expect_root_cause(VerbsPair& pair, const WorkRequest& bad, const std::string& words) {
    for (uint64_t i = 0; i < 5; ++i) {
      ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kWrite, i * 64, i * 64, 64), i));
    }
    // They are acknowledged first: Soft-RoCE, once it has failed a request by itself, repeats none
    // before it, so a lost acknowledgement would stop it for good (verbs_schedule_test.cc mixes
    // them, under deadlines).
    auto all = pair.drain();
    ASSERT_EQ(all.size(), 5u);
    ASSERT_TRUE(pair.ring->post(bad, 5));
    for (uint64_t i = 6; i < 12; ++i) {
      ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kWrite, i * 64, i * 64, 64), i));
    }
    const auto rest = pair.drain();
    all.insert(all.end(), rest.begin(), rest.end());
    ASSERT_EQ(all.size(), 12u) << "every request retires exactly once";
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i].cookie, i);
    EXPECT_TRUE(pair.a->drained());
    const std::string& text = pair.ring->failure().text;
    EXPECT_EQ(pair.ring->failure().code, ErrorCode::kPeerLost);
    EXPECT_NE(text.find(words), std::string::npos) << text;
    EXPECT_NE(text.find(" 5 with peer b"), std::string::npos) << text;
    EXPECT_NE(text.find("vendor error"), std::string::npos) << text;
    EXPECT_EQ(tally(all).bad, 1u) << "one root cause; what follows it is flushed";
    EXPECT_FALSE(pair.ring->post(bad, 99)) << "a failed ring takes nothing";
  }
};

TEST_F(VerbsFaultTest, AWrongRemoteKeyIsOneRootCause) {
  VerbsPair pair(quick(0), quick(1), 1 << 20, [](EndpointInfo& info) {
    VerbsRegion wrong = info.regions[0];
    wrong.remote_key ^= 0x5500;
    info.regions.push_back(wrong);
  });
  WorkRequest bad = VerbsPair::request(LinkOp::kWrite, 0, 0, 64);
  bad.remote_region = 1;
  expect_root_cause(pair, bad, "remote access");
}

TEST_F(VerbsFaultTest, ARemoteAddressOutOfBoundsIsOneRootCause) {
  VerbsPair pair(quick(0), quick(1));
  expect_root_cause(pair, VerbsPair::request(LinkOp::kWrite, 0, (1 << 20) - 10, 64),
                    "remote access");
}

TEST_F(VerbsFaultTest, ARemoteReadOutOfBoundsIsOneRootCauseAndWritesNothing) {
  VerbsPair pair(quick(0), quick(1));
  std::memset(pair.here->data() + 4096, 0x77, 64);
  expect_root_cause(pair, VerbsPair::request(LinkOp::kRead, 4096, (1 << 20) - 10, 64),
                    "remote access");
  for (int i = 0; i < 64; ++i) EXPECT_EQ(pair.here->data()[4096 + i], 0x77);
}

TEST_F(VerbsFaultTest, ALocalRangeOutOfBoundsIsOneRootCause) {
  VerbsPair pair(quick(0), quick(1));
  expect_root_cause(pair, VerbsPair::request(LinkOp::kWrite, (1 << 20) - 10, 0, 64),
                    "local protection");
}

TEST_F(VerbsFaultTest, ARegionTheTableDoesNotHaveIsOneRootCause) {
  VerbsPair pair(quick(0), quick(1));
  WorkRequest bad = VerbsPair::request(LinkOp::kWrite, 0, 0, 64);
  bad.remote_region = 9;
  expect_root_cause(pair, bad, "remote access");
}

TEST_F(VerbsFaultTest, ARemoteRegionDeregisteredUnderUsIsOneRootCause) {
  auto pair = std::make_unique<VerbsPair>(quick(0), quick(1));
  // The far side's queue pair lives on; its registration goes with a second domain.
  const auto extra = make_verbs_region(4096);
  auto domain = VerbsDomain::open(quick(1), {extra}, 1);
  const VerbsRegion gone = domain->region(0);
  domain.reset();
  VerbsPair other(quick(0), quick(1), 1 << 20,
                  [&](EndpointInfo& info) { info.regions.push_back(gone); });
  WorkRequest bad = VerbsPair::request(LinkOp::kWrite, 0, 0, 64);
  bad.remote_region = 1;
  expect_root_cause(other, bad, "remote access");
}

TEST_F(VerbsFaultTest, APeerWhoseQueuePairIsGoneEndsInRetriesExceeded) {
  VerbsPair pair(quick(0), quick(1));
  pair.b.reset();
  ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kWrite, 0, 0, 64), 1));
  pair.ring->doorbell();
  Retired retired[4];
  size_t n = 0;
  const int64_t begin = now_ns(), deadline = in_seconds(30);
  while (n == 0 && now_ns() < deadline) n = pair.ring->poll(retired);
  ASSERT_EQ(n, 1u);
  EXPECT_EQ(retired[0].status, WorkStatus::kPeerLost);
  EXPECT_NE(pair.ring->failure().text.find("retry"), std::string::npos)
      << pair.ring->failure().text;
  EXPECT_LT(now_ns() - begin, 20'000'000'000);
}

TEST_F(VerbsFaultTest, ALinkThatGoesDownFlushesAndANewEpochWorksAfterwards) {
  {
    VerbsPair pair(quick(0), quick(1));
    fill_random(pair.here->data(), pair.here->bytes(), 1);
    ASSERT_TRUE(command("ip link set v0 down"));
    for (uint64_t i = 0; i < 20; ++i) {
      ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kWrite, i * 64, i * 64, 64), i));
    }
    const auto all = pair.drain(30);
    ASSERT_TRUE(
        command("ip link set v0 up && ip neigh replace 10.77.0.2 lladdr 02:00:00:77:00:02 "
                "dev v0 nud permanent"));
    ASSERT_EQ(all.size(), 20u);
    EXPECT_TRUE(pair.a->drained());
    EXPECT_EQ(tally(all).done, 0u);
  }
  for (int attempt = 0; attempt < 50; ++attempt) {
    if (verbs_devices().front().state == "active") break;
    usleep(100'000);
  }
  VerbsPair again(quick(0), quick(1), 1 << 20, {}, 2);
  EXPECT_EQ(again.a->peer_epoch(), 2u);
  fill_random(again.here->data(), 4096, 2);
  ASSERT_TRUE(again.ring->post(VerbsPair::request(LinkOp::kWrite, 0, 0, 4096), 7));
  const auto all = again.drain();
  ASSERT_EQ(all.size(), 1u) << "nothing of the old epoch is counted";
  EXPECT_EQ(all[0].cookie, 7u);
  EXPECT_EQ(std::memcmp(again.here->data(), again.there->data(), 4096), 0);
}

TEST_F(VerbsFaultTest, TakingALinkDownFlushesWhatIsOutstandingAndDrains) {
  for (const PostMethod method : {PostMethod::kPostSend, PostMethod::kWorkRequestApi}) {
    for (const uint32_t stripes : {1u, 3u}) {
      VerbsOptions options = quick(0), peer = quick(1);
      options.post_method = method;
      options.queue_pairs = peer.queue_pairs = stripes;
      VerbsPair pair(options, peer);
      for (uint64_t i = 0; i < 200; ++i) {
        ASSERT_TRUE(pair.ring->post(VerbsPair::request(LinkOp::kWrite, 0, 0, 4096), i));
      }
      pair.ring->fail({ErrorCode::kTimeout, 0, "deadline"});
      const auto all = pair.drain();
      EXPECT_EQ(all.size(), 200u);
      EXPECT_TRUE(pair.a->drained());
      EXPECT_EQ(pair.ring->failure().code, ErrorCode::kTimeout) << "the caller's reason stays";
    }
  }
}

// Straight on the link, without the ring that knows the depth: the device itself refuses.
TEST_F(VerbsFaultTest, AFullSendQueueIsBackPressureAndPostingGoesOnAtTheRefusedRequest) {
  for (const PostMethod method : {PostMethod::kPostSend, PostMethod::kWorkRequestApi}) {
    VerbsOptions options = quick(0);
    options.post_method = method;
    options.send_depth = 8;
    options.timeout = 16;
    VerbsPair pair(options, quick(1));
    fill_random(pair.here->data(), pair.here->bytes(), 4);
    ASSERT_TRUE(silence(true));  // nothing completes until the queue is full
    constexpr uint64_t kCount = 256, kPiece = 4096;
    uint64_t accepted = 0, completed = 0, refusals = 0;
    const int64_t deadline = in_seconds(20);
    while (completed < kCount && now_ns() < deadline) {
      std::vector<WorkRequest> list;
      for (uint64_t i = accepted; i < std::min(accepted + 8, kCount); ++i) {
        list.push_back(VerbsPair::request(LinkOp::kWrite, i * kPiece, i * kPiece, kPiece));
        list.back().wr_id = i;
        list.back().signalled = true;
      }
      const PostResult result = pair.a->post(list);
      ASSERT_LE(result.accepted, list.size());
      ASSERT_TRUE(result.error == 0 || result.error == ENOMEM) << result.error;
      if (result.error == ENOMEM && refusals++ == 0) {
        ASSERT_TRUE(silence(false));
      }
      accepted += result.accepted;
      if (result.error == 0 && accepted < kCount) continue;  // until it is full
      WorkCompletion out[16];
      const size_t n = pair.a->poll(out);
      for (size_t i = 0; i < n; ++i, ++completed) {
        ASSERT_EQ(out[i].status, WorkStatus::kSuccess);
        ASSERT_EQ(out[i].wr_id, completed) << "none twice, none left out";
      }
    }
    EXPECT_EQ(completed, kCount);
    EXPECT_GT(refusals, 0u) << "this device never said that it is full";
    EXPECT_EQ(std::memcmp(pair.here->data(), pair.there->data(), kCount * kPiece), 0);
  }
}

TEST_F(VerbsFaultTest, ADeadlineOnASilentLinkIsATypedTimeoutAndGivesTheSlotsBack) {
  TrafficOptions options;
  options.transport = Transport::kVerbs;
  options.verbs = quick(0);
  options.verbs.timeout = 20;  // the device itself would try for half a minute
  Engine pe("silent-pe", kLayers, nullptr, options);
  options.verbs.device = quick(1).device;
  Engine de("silent-de", kLayers, nullptr, options);
  const PeerId peer = pe.manager->connect(address_of("silent-de"), in_seconds(10));
  ASSERT_TRUE(silence(true));
  const auto slots = acquire(*pe.pool, 4);
  MoveSpec push = pe.move(std::vector<uint64_t>(kBlocks, 4096));
  push.peer = peer;
  push.slots = slots;
  push.into = pe.manager->make_stream(1);
  push.deadline_ns = in_seconds(0.4);
  const auto ticket = pe.manager->push(push);
  for (const uint32_t slot : slots) pe.pool->release(slot);
  EXPECT_EQ(pe.pool->available(), pe.pool->num_slots() - 4) << "the transfer still holds them";
  EXPECT_TRUE(ticket->wait(push.deadline_ns + 1'000'000'000));
  EXPECT_EQ(ticket->outcome().code, ErrorCode::kTimeout) << ticket->outcome().text;
  EXPECT_NE(ticket->outcome().text.find("silent-de"), std::string::npos);
  EXPECT_EQ(push.into->failure().code, ErrorCode::kTimeout);
  EXPECT_EQ(pe.pool->available(), pe.pool->num_slots());
  EXPECT_FALSE(pe.manager->peer_alive(peer)) << "only a link that is down is known to be quiet";
  ASSERT_TRUE(silence(false));
}

// A peer process that dies in the middle, with the control socket as the witness.
TEST_F(VerbsFaultTest, KillingThePeerProcessMidTransferEndsEverythingSoon) {
  const std::string address = address_of("killed");
  const pid_t child = fork();
  if (child == 0) {
    const auto region = make_verbs_region(1 << 20);
    const auto domain = VerbsDomain::open(quick(1), {region}, 1);
    const auto listener = make_verbs_listener(address, domain, "child", 1, [] {});
    pause();
    _exit(0);
  }
  const auto region = make_verbs_region(1 << 20);
  const auto domain = VerbsDomain::open(quick(0), {region}, 1);
  const auto listener = make_verbs_listener(address + "-own", domain, "parent", 1, [] {});
  auto links = listener->connect(address, in_seconds(10));
  WorkRing ring(*links.front());
  Retired retired[64];
  uint64_t posted = 0, finished = 0;
  const int64_t stop = in_seconds(0.2);
  const auto step = [&] {
    while (ring.post(VerbsPair::request(LinkOp::kWrite, 0, 0, 65'536), posted)) ++posted;
    ring.doorbell();
    finished += ring.poll(retired);
  };
  while (now_ns() < stop) step();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const int64_t killed = now_ns();
  while (!ring.failed() && now_ns() - killed < 10'000'000'000) step();
  EXPECT_TRUE(ring.failed());
  const int64_t deadline = in_seconds(5);
  while ((ring.outstanding() > 0 || !links.front()->drained()) && now_ns() < deadline) {
    finished += ring.poll(retired);
  }
  EXPECT_EQ(ring.outstanding(), 0u);
  EXPECT_EQ(finished, posted);
  EXPECT_TRUE(links.front()->drained());
}

TEST_F(VerbsFaultTest, AStrangerAtTheListenerIsRefusedAndTheNextPeerIsServed) {
  const std::string address = address_of("stranger");
  const auto domain = VerbsDomain::open(quick(0), {make_verbs_region(4096)}, 1);
  const auto listener = make_verbs_listener(address, domain, "self", 1, [] {});
  {
    const Fd stranger = control_connect(address, SocketKind::kStream, in_seconds(5));
    const char noise[] = "GET / HTTP/1.1\r\nHost: decode\r\n\r\n";
    control_send(stranger, noise, sizeof noise, in_seconds(5));
    usleep(50'000);
  }
  const auto other = VerbsDomain::open(quick(1), {make_verbs_region(4096)}, 1);
  const auto caller = make_verbs_listener(address + "-b", other, "b", 1, [] {});
  EXPECT_EQ(caller->connect(address, in_seconds(10)).size(), kNumTrafficClasses);
}

// Soft-RoCE keeps a device that is being removed until its last user lets go. Whatever it does to
// what is under way, everything retires, and letting go frees the device. Last: it takes it away.
TEST_F(VerbsFaultTest, XADeviceRemovedUnderUsHoldsNothingUpAndCanComeBack) {
  {
    VerbsPair pair(quick(0), quick(1));
    ASSERT_TRUE(command("(rdma link delete rxe0; touch /tmp/kvt-deleted) &"));
    Retired retired[64];
    uint64_t posted = 0, finished = 0;
    const auto step = [&] {
      if (pair.ring->post(VerbsPair::request(LinkOp::kWrite, 0, 0, 4096), posted)) ++posted;
      pair.ring->doorbell();
      finished += pair.ring->poll(retired);
    };
    for (const int64_t stop = in_seconds(1); now_ns() < stop && !pair.ring->failed();) step();
    pair.ring->fail({ErrorCode::kCancelled, 0, "leaving"});
    const int64_t deadline = in_seconds(5);
    // Either may be first: one poll() hands out at most 64, and when all requests have completed
    // the drain's own marker may still be under way.
    while ((pair.ring->outstanding() > 0 || !pair.a->drained()) && now_ns() < deadline) {
      finished += pair.ring->poll(retired);
    }
    EXPECT_EQ(finished, posted);
    EXPECT_TRUE(pair.a->drained());
  }
  ASSERT_TRUE(
      command("for i in $(seq 100); do [ -e /tmp/kvt-deleted ] && break; sleep 0.1; done; "
              "rm /tmp/kvt-deleted && rdma link add rxe0 type rxe netdev v0"));
  VerbsPair again(quick(0), quick(1));
  ASSERT_TRUE(again.ring->post(VerbsPair::request(LinkOp::kWrite, 0, 0, 4096), 1));
  EXPECT_EQ(again.drain().size(), 1u);
  EXPECT_FALSE(again.ring->failed()) << again.ring->failure().text;
}

}  // namespace
}  // namespace kvtransfer
