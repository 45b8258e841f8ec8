// Random moves between two engines over real queue pairs, with a fault at a random moment.
#include <unistd.h>

#include "engine_fixture.h"
#include "verbs_fixture.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

// 200 schedules of moves between two engines with a fault at a random moment. Whatever is reported
// as delivered is byte-exact, everything ends in time, and the pools are full again.
class VerbsScheduleTest : public BreakableDevices {
 protected:
  enum class Fault { kNone, kCancel, kDeadline, kCloseReceive, kKillLink, kPeerGone };

  static TrafficOptions options(size_t engine, uint32_t queue_pairs) {
    TrafficOptions out;
    out.transport = Transport::kVerbs;
    out.verbs = quick(engine);
    out.verbs.queue_pairs = queue_pairs;
    return out;
  }
  static bool token_arrived(const Engine& from, const Engine& to,
                            const std::vector<uint64_t>& starts, uint32_t layer, uint32_t t) {
    const auto wanted = from.token(layer, t);
    for (uint32_t plane = 0; plane < 2; ++plane) {
      const uint8_t* at = to.pool->region()->data() + starts[t / 16] +
                          to.layout.layer_offset(layer) + plane * 16 * 256 + t % 16 * 256;
      if (std::memcmp(at, wanted.data() + plane * 256, 256) != 0) return false;
    }
    return true;
  }
  void run_schedule(uint64_t seed);
};

void VerbsScheduleTest::run_schedule(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto fault = static_cast<Fault>(random() % 6);
  const uint32_t stripes = random() % 4 == 0 ? 2 : 1;
  const std::string name = "s" + std::to_string(seed);
  Engine pe(name + "p", kLayers, nullptr, options(0, stripes));
  auto de = std::make_unique<Engine>(name + "d", kLayers, nullptr, options(1, stripes));
  const PeerId peer = pe.manager->connect(address_of(name + "d"), in_seconds(10));
  fill_random(pe.device->data(), pe.device->bytes(), seed);
  const auto slots = acquire(*de->pool, kBlocks);
  const auto starts = de->starts(slots);
  const auto received = de->manager->make_stream(1);
  const uint32_t tag = de->manager->open_receive(received);
  const auto computed = pe.manager->make_stream(1), gone = pe.manager->make_stream(1);
  const auto held = acquire(*pe.pool, 3);
  MoveSpec push = pe.move(starts);
  push.after = computed;
  push.into = gone;
  push.peer = peer;
  push.tag = tag;
  push.slots = held;
  push.deadline_ns = in_seconds(fault == Fault::kDeadline ? 0.1 : 10);
  const auto ticket = pe.manager->push(push);
  for (const uint32_t slot : held) pe.pool->release(slot);
  const uint32_t moment = random() % kLayers;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (layer == moment) {
      if (fault == Fault::kCancel) ticket->cancel();
      if (fault == Fault::kDeadline) break;
      if (fault == Fault::kCloseReceive) de->manager->close_receive(tag);
      if (fault == Fault::kPeerGone) de->manager.reset();
      if (fault == Fault::kKillLink) {
        // A move with a deadline that has passed, behind requests that may still run.
        MoveSpec late = pe.move(starts);
        late.peer = peer;
        late.deadline_ns = now_ns() + 2'000'000;
        EXPECT_TRUE(pe.manager->stage_from_peer(late)->wait(in_seconds(12)));
      }
    }
    computed->publish(layer);
    if (random() % 2 == 0) usleep(random() % 3000);
  }
  ASSERT_TRUE(ticket->wait(push.deadline_ns + 1'000'000'000)) << "hangs beyond its deadline + 1 s";
  const Outcome& outcome = ticket->outcome();
  EXPECT_TRUE(fault != Fault::kNone || outcome.ok()) << outcome.text;
  EXPECT_TRUE(fault != Fault::kDeadline || outcome.code == ErrorCode::kTimeout) << outcome.text;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (!gone->ready(layer) && !received->ready(layer)) continue;
    for (uint32_t t = 0; t < kTokens; t += 11) {
      ASSERT_TRUE(token_arrived(pe, *de, starts, layer, t)) << "layer " << layer << " token " << t;
    }
  }
  EXPECT_EQ(pe.pool->available(), pe.pool->num_slots());
  for (const uint32_t slot : slots) EXPECT_TRUE(de->pool->release(slot));
  de->manager.reset();
  EXPECT_EQ(de->pool->available(), de->pool->num_slots());
}

TEST_F(VerbsScheduleTest, TwoHundredRandomFaultsDeliverNothingWrongAndLeakNothing) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("schedule " + std::to_string(seed));
    run_schedule(seed);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace kvtransfer
