// The table of peers over scripted links: classes, losses, counters, arming and draining.
#include "traffic/peers.h"

#include <errno.h>
#include <time.h>

#include <set>
#include <thread>

#include "scripted_link.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::in_seconds;
using testing::ScriptedLink;

class PeersTest : public ::testing::Test {
 protected:
  // A peer with one link per class, or a single one; the links stay owned by peers_.
  PeerId add(size_t classes) {
    PeerLinks links;
    links_.clear();
    for (size_t i = 0; i < classes; ++i) {
      auto link = std::make_unique<ScriptedLink>(LinkLimits{256, 1 << 20, true});
      links_.push_back(link.get());
      links.push_back(std::move(link));
    }
    return peers_.add(std::move(links));
  }
  void post(PeerId peer, TrafficClass traffic_class, RingBatch& batch, uint64_t bytes = 64) {
    WorkRequest request;
    request.length = bytes;
    ++batch.outstanding;
    ASSERT_TRUE(
        peers_.ring(peer, traffic_class)->post(request, reinterpret_cast<uint64_t>(&batch)));
    peers_.doorbell();
  }

  Peers peers_;
  std::vector<ScriptedLink*> links_;
};

TEST_F(PeersTest, EachTrafficClassHasItsOwnRingAndCounters) {
  const PeerId peer = add(2);
  EXPECT_NE(peers_.ring(peer, TrafficClass::kKv), peers_.ring(peer, TrafficClass::kModel));
  RingBatch kv, model;
  post(peer, TrafficClass::kKv, kv, 100);
  post(peer, TrafficClass::kModel, model, 7);
  post(peer, TrafficClass::kModel, model, 7);
  for (ScriptedLink* link : links_) link->complete(9);
  EXPECT_TRUE(peers_.poll());
  EXPECT_EQ(kv.outstanding, 0u);
  EXPECT_EQ(model.outstanding, 0u);
  EXPECT_EQ(peers_.counters(TrafficClass::kKv).write_bytes, 100u);
  EXPECT_EQ(peers_.counters(TrafficClass::kModel).write_bytes, 14u);
  EXPECT_EQ(peers_.counters(TrafficClass::kModel).work_requests, 2u);
  EXPECT_EQ(links_[0]->posts.size(), 1u);
  EXPECT_EQ(links_[1]->posts.size(), 2u);
}

TEST_F(PeersTest, ASingleLinkServesAllClasses) {
  const PeerId peer = add(1);
  EXPECT_EQ(peers_.ring(peer, TrafficClass::kKv), peers_.ring(peer, TrafficClass::kModel));
  EXPECT_EQ(peers_.ring(peer + 1, TrafficClass::kKv), nullptr);
}

TEST_F(PeersTest, TheLossOfOneClassIsTheLossOfThePeer) {
  const PeerId peer = add(2);
  RingBatch kv, model;
  post(peer, TrafficClass::kKv, kv);
  post(peer, TrafficClass::kModel, model);
  EXPECT_TRUE(peers_.alive(peer));
  links_[1]->break_at(0, WorkStatus::kPeerLost, 12);
  peers_.poll();
  EXPECT_FALSE(peers_.alive(peer));
  EXPECT_TRUE(links_[0]->failed());
  peers_.poll();
  EXPECT_TRUE(kv.failed && model.failed);
  EXPECT_EQ(kv.outstanding + model.outstanding, 0u);
}

TEST_F(PeersTest, APeerThatComesBackIsANewOneAndTheOldStaysLost) {
  const PeerId first = add(1);
  const std::string name = links_[0]->peer();
  links_[0]->fail();
  peers_.poll();
  EXPECT_THROW(peers_.wait(name, in_seconds(0.02)), Error);
  const PeerId second = add(1);
  EXPECT_NE(first, second);
  EXPECT_EQ(peers_.wait(name, in_seconds(1)), second);
  EXPECT_FALSE(peers_.alive(first));
  EXPECT_TRUE(peers_.alive(second));
  EXPECT_FALSE(peers_.alive(77));
}

TEST_F(PeersTest, WaitingForAPeerEndsWhenItIsAdded) {
  std::thread later([this] {
    const timespec pause{0, 20'000'000};
    nanosleep(&pause, nullptr);
    add(1);
  });
  EXPECT_EQ(peers_.wait("scripted-peer", in_seconds(10)), 0u);
  later.join();
}

TEST_F(PeersTest, ImmediatesOfEveryClassCountAsArrivals) {
  add(2);
  const auto stream = std::make_shared<LayerStream>(3, 2);
  const uint32_t tag = peers_.open_receive(stream);
  links_[0]->immediates.push_back(pack_immediate(tag, 1));
  links_[1]->immediates.push_back(pack_immediate(tag, 1));
  links_[1]->immediates.push_back(pack_immediate(tag + 1, 2));  // nobody's
  EXPECT_TRUE(peers_.poll());
  EXPECT_TRUE(stream->ready(1));
  EXPECT_EQ(stream->arrived(2), 0u);
  links_[0]->immediates.push_back(pack_immediate(tag, kGaveUp));
  peers_.poll();
  EXPECT_TRUE(stream->failed());
  EXPECT_EQ(stream->failure().code, ErrorCode::kCancelled);
}

TEST_F(PeersTest, TagsInUseAreNotGivenAgain) {
  std::set<uint32_t> tags;
  const auto stream = std::make_shared<LayerStream>(1);
  for (int i = 0; i < 2000; ++i) tags.insert(peers_.open_receive(stream));
  EXPECT_EQ(tags.size(), 2000u);
  for (const uint32_t tag : tags) peers_.close_receive(tag);
  const uint32_t next = peers_.open_receive(stream);
  EXPECT_FALSE(tags.contains(next)) << "not soon again either";
}

TEST_F(PeersTest, ArmingAsksEveryLinkAndSaysWhetherAllAreQuiet) {
  add(2);
  EXPECT_TRUE(peers_.arm());
  links_[1]->quiet = false;
  EXPECT_FALSE(peers_.arm());
  EXPECT_EQ(links_[0]->armed, 2u);
  EXPECT_EQ(links_[1]->armed, 2u);
}

TEST_F(PeersTest, ALinkThatFailedAndIsNotQuietIsDraining) {
  add(1);
  EXPECT_FALSE(peers_.draining());
  links_[0]->drain_allowed = false;
  links_[0]->fail();
  peers_.poll();
  EXPECT_TRUE(peers_.draining());
  std::vector<int> fds;
  peers_.append_event_fds(fds);
  EXPECT_EQ(fds.size(), 1u) << "its completions are still waited for";
  links_[0]->drain_allowed = true;
  peers_.poll();
  EXPECT_FALSE(peers_.draining());
  fds.clear();
  peers_.append_event_fds(fds);
  EXPECT_TRUE(fds.empty());
}

TEST_F(PeersTest, WorkIsInFlightFromTheDoorbellToTheCompletion) {
  const PeerId peer = add(2);
  EXPECT_FALSE(peers_.has_work_in_flight());
  RingBatch batch;
  post(peer, TrafficClass::kModel, batch);
  EXPECT_TRUE(peers_.has_work_in_flight());
  links_[1]->complete(1);
  peers_.poll();
  EXPECT_FALSE(peers_.has_work_in_flight());
}

TEST_F(PeersTest, BackPressureIsToldAndTheRestGoesOnLater) {
  const PeerId peer = add(1);
  links_[0]->answers.push_back({0, ENOMEM});
  RingBatch batch;
  WorkRequest request;
  ++batch.outstanding;
  peers_.ring(peer, TrafficClass::kKv)->post(request, reinterpret_cast<uint64_t>(&batch));
  const auto first = peers_.doorbell();
  EXPECT_TRUE(first.back_pressure);
  EXPECT_FALSE(first.posted);
  const auto second = peers_.doorbell();
  EXPECT_FALSE(second.back_pressure);
  EXPECT_TRUE(second.posted);
}

TEST_F(PeersTest, AttributesAreThoseOfTheLinksByClass) {
  const PeerId peer = add(2);
  links_[0]->told = {{"device", "mlx5_0"}};
  links_[1]->told = {{"device", "mlx5_1"}};
  const auto attributes = peers_.attributes(peer);
  ASSERT_EQ(attributes.size(), 2u);
  EXPECT_EQ(attributes[0][0].second, "mlx5_0");
  EXPECT_EQ(attributes[1][0].second, "mlx5_1");
  EXPECT_TRUE(peers_.attributes(9).empty());
}

}  // namespace
}  // namespace kvtransfer
