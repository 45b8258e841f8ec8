// Two engines and what moves between them, over every transport that this machine has.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "engine_fixture.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

struct Case {
  const char* name;
  Transport transport;
  PostMethod post_method;
  uint32_t queue_pairs;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class TrafficPeersTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().transport != Transport::kVerbs) return;
    std::string why;
    devices_ = verbs_devices(&why);
    if (devices_.empty()) GTEST_SKIP() << "no verbs device: " << why;
  }
  // Each engine on a device of its own, where there are two.
  TrafficOptions options(size_t engine) const {
    TrafficOptions out;
    out.transport = GetParam().transport;
    if (!devices_.empty()) out.verbs.device = devices_[engine % devices_.size()].device;
    out.verbs.post_method = GetParam().post_method;
    out.verbs.queue_pairs = GetParam().queue_pairs;
    return out;
  }
  std::vector<VerbsPort> devices_;
};

// Figure 4: PE device -> DE buffer by push; DE buffer -> PE device by read behind a serve.
TEST_P(TrafficPeersTest, PushAndReadBackBetweenTwoEngines) {
  Engine pe("pe", kLayers, nullptr, options(0)), de("de", kLayers, nullptr, options(1));
  const PeerId to_de = pe.manager->connect(address_of("de"), in_seconds(5));
  const PeerId to_pe = de.manager->wait_peer("pe", in_seconds(5));
  fill_random(pe.device->data(), pe.device->bytes(), 3);
  const std::vector<uint8_t> original(pe.device->data(), pe.device->data() + pe.device->bytes());
  const auto slots = acquire(*de.pool, kBlocks);
  const auto received = de.manager->make_stream(1);
  const uint32_t tag = de.manager->open_receive(received);
  const auto computed = pe.manager->make_stream(1), gone = pe.manager->make_stream(1);
  MoveSpec push = pe.move(de.starts(slots));
  push.after = computed;
  push.into = gone;
  push.peer = to_de;
  push.tag = tag;
  const auto pushed = pe.manager->push(push);
  for (uint32_t l = 0; l < kLayers; ++l) {
    EXPECT_FALSE(received->ready(l));
    computed->publish(l);
    ASSERT_EQ(received->wait(l, in_seconds(5)), WaitResult::kReady);
  }
  ASSERT_TRUE(pushed->wait(in_seconds(5)));
  std::fill_n(pe.device->data(), pe.device->bytes(), 0);
  const auto notice = pe.manager->make_stream(1), staged = pe.manager->make_stream(1);
  MoveSpec serve;
  serve.after = received;
  serve.peer = to_pe;
  serve.tag = pe.manager->open_receive(notice);
  serve.slots = slots;
  ASSERT_TRUE(de.manager->serve(serve)->wait(in_seconds(5)));
  MoveSpec read = pe.move(de.starts(slots));
  read.after = notice;
  read.into = staged;
  read.peer = to_de;
  ASSERT_TRUE(pe.manager->stage_from_peer(read)->wait(in_seconds(5)));
  ASSERT_TRUE(wait_all(*staged));
  for (uint32_t l = 0; l < kLayers; ++l) {
    for (uint32_t t = 0; t < kTokens; ++t) {
      const auto now = pe.token(l, t);
      const uint64_t base = pe.cache->layer(l).base + (t / 16 + 3) * 16 * 256 + t % 16 * 256;
      ASSERT_EQ(memcmp(now.data(), original.data() + base, 256), 0);
    }
  }
  EXPECT_EQ(pe.manager->counters(TrafficKind::kNetworkRead).bytes,
            kTokens * pe.layout.bytes_per_token());
  EXPECT_EQ(pe.manager->counters(TrafficKind::kNetworkWrite).bytes,
            kTokens * pe.layout.bytes_per_token());
  EXPECT_LT(pe.manager->ring_counters(TrafficClass::kKv).doorbells,
            pe.manager->ring_counters(TrafficClass::kKv).work_requests / 4);
}

TEST_P(TrafficPeersTest, AFailedSourceIsPassedOnToThePeerAsANegativeAcknowledgement) {
  Engine pe("npe", 3, nullptr, options(0)), de("nde", kLayers, nullptr, options(1));
  pe.manager->connect(address_of("nde"), in_seconds(5));
  const auto source = de.manager->make_stream(1), notice = pe.manager->make_stream(1);
  MoveSpec serve;
  serve.after = source;
  serve.peer = de.manager->wait_peer("npe", in_seconds(5));
  serve.tag = pe.manager->open_receive(notice);
  const auto ticket = de.manager->serve(serve);
  source->publish(0);
  ASSERT_EQ(notice->wait(0, in_seconds(5)), WaitResult::kReady);
  source->fail({ErrorCode::kCorrupt, 0, "rot"});
  EXPECT_EQ(notice->wait(1, in_seconds(5)), WaitResult::kFailed);
  EXPECT_TRUE(ticket->wait(in_seconds(5)));
  EXPECT_EQ(ticket->outcome().code, ErrorCode::kCorrupt);
}

TEST_P(TrafficPeersTest, ThePeersDeathFailsWhatWasUnderWayAndFreesItsSlots) {
  const std::string child_name = address_of("child");
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    TrafficOptions own = options(1);
    own.name = "child";
    own.listen = child_name;
    const BlockLayout layout(kLayers, kBlockTokens, {256, 256});
    TrafficManager manager(nullptr, make_pool(layout, 24), nullptr, layout, own);
    (void)!write(ready[1], "x", 1);
    pause();
    _exit(0);
  }
  char byte;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  Engine pe("dpe", kLayers, nullptr, options(0));
  const PeerId peer = pe.manager->connect(child_name, in_seconds(5));
  EXPECT_TRUE(pe.manager->peer_alive(peer));
  const auto computed = pe.manager->make_stream(1), gone = pe.manager->make_stream(1);
  std::vector<uint64_t> starts(kBlocks, 4096);
  MoveSpec push = pe.move(starts);
  push.after = computed;
  push.into = gone;
  push.peer = peer;
  push.slots = acquire(*pe.pool, 4);
  const auto slots = push.slots;
  const auto ticket = pe.manager->push(push);
  computed->publish(0);
  ASSERT_EQ(gone->wait(0, in_seconds(5)), WaitResult::kReady);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(gone->wait(1, in_seconds(5)), WaitResult::kFailed);
  EXPECT_EQ(gone->failure().code, ErrorCode::kPeerLost);
  EXPECT_NE(gone->failure().text.find("child"), std::string::npos);
  ASSERT_TRUE(ticket->wait(in_seconds(5)));
  for (const uint32_t slot : slots) pe.pool->release(slot);
  EXPECT_EQ(pe.pool->available(), 24u);
  EXPECT_FALSE(pe.manager->peer_alive(peer));
}

TEST_P(TrafficPeersTest, AnImmediateForAClosedReceiveIsDropped) {
  Engine pe("ope", kLayers, nullptr, options(0)), de("ode", kLayers, nullptr, options(1));
  const PeerId peer = pe.manager->connect(address_of("ode"), in_seconds(5));
  const auto old_one = de.manager->make_stream(1), new_one = de.manager->make_stream(1);
  const uint32_t stale = de.manager->open_receive(old_one);
  de.manager->close_receive(stale);
  const uint32_t fresh = de.manager->open_receive(new_one);
  EXPECT_NE(stale, fresh);
  for (const uint32_t tag : {stale, fresh}) {
    MoveSpec serve;
    serve.peer = peer;
    serve.tag = tag;
    ASSERT_TRUE(pe.manager->serve(serve)->wait(in_seconds(5)));
  }
  ASSERT_TRUE(wait_all(*new_one));
  EXPECT_EQ(old_one->arrived(0), 0u);
  EXPECT_EQ(new_one->arrived(0), 1u);
}

INSTANTIATE_TEST_SUITE_P(
    Transports, TrafficPeersTest,
    ::testing::Values(Case{"shm", Transport::kShm, PostMethod::kAuto, 1},
                      Case{"verbs_post_send", Transport::kVerbs, PostMethod::kPostSend, 1},
                      Case{"verbs_wr_api", Transport::kVerbs, PostMethod::kWorkRequestApi, 1},
                      Case{"verbs_striped", Transport::kVerbs, PostMethod::kAuto, 3}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvtransfer
