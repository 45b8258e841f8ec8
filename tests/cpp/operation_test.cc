// The progress thread's operations, stepped by hand against a scripted link and a faulty queue:
// every refusal, failure and delay in a known order.
#include "traffic/operation.h"

#include <errno.h>

#include "faulty_queue.h"
#include "scripted_link.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

constexpr uint32_t kLayers = 5;
const BlockLayout kLayout(kLayers, 16, {64, 64});

class OperationTest : public ::testing::Test {
 protected:
  OperationTest() : stats_(true) {
    device_ = std::make_shared<MemoryRegion>(3 * 2 * 8 * 16 * 64, RegionKind::kAnonymous,
                                             HugePages::kOff);
    std::vector<CacheLayer> layers;
    for (uint32_t l = 0; l < 3; ++l) {
      layers.push_back({l * 2 * 8192ul, 1024, {{0, 64, 64}, {8192, 64, 64}}});
    }
    cache_ = std::make_shared<PagedCache>(device_->bytes(), 16, 8, layers);
    pool_ = make_pool(kLayout, 16, RegionKind::kAnonymous);
    progress_.pool = pool_.get();
    progress_.device = device_.get();
    progress_.layout = &kLayout;
    progress_.peers = &peers_;
    progress_.stats = &stats_;
    progress_.buckets = &buckets_;
    progress_.now_ns = now_ns();
  }

  // A peer behind a scripted link; the link stays owned by peers_.
  ScriptedLink& add_link(LinkLimits limits = {256, 1 << 20, true}) {
    auto link = std::make_unique<ScriptedLink>(limits);
    ScriptedLink& reference = *link;
    PeerLinks links;
    links.push_back(std::move(link));
    peer_ = peers_.add(std::move(links));
    return reference;
  }
  MoveSpec spec(uint64_t tokens = 100) {
    MoveSpec out;
    out.cache = cache_;
    for (int32_t page = 0; page < 8; ++page) out.pages.push_back(page);
    for (uint32_t slot = 0; slot < 8; ++slot)
      out.block_starts.push_back(pool_->payload_offset(slot));
    out.num_tokens = tokens;
    out.peer = peer_;
    out.into = std::make_shared<LayerStream>(kLayers);
    return out;
  }
  // One round of the progress loop.
  void round(Operation& operation) {
    progress_.now_ns = now_ns();
    progress_.wake_at_ns = kNoDeadline;
    peers_.poll();
    operation.check_limits(progress_);
    operation.step(progress_);
    peers_.doorbell();
  }

  std::shared_ptr<MemoryRegion> device_;
  std::shared_ptr<PagedCache> cache_;
  std::shared_ptr<BufferPool> pool_;
  Peers peers_;
  TrafficStats stats_;
  std::array<TokenBucket, kNumTrafficKinds> buckets_;
  Progress progress_;
  PeerId peer_ = 0;
};

TEST_F(OperationTest, APushSendsEachLayerBehindItsTriggerAndEndsItWithItsImmediate) {
  ScriptedLink& link = add_link();
  MoveSpec s = spec();
  s.after = std::make_shared<LayerStream>(kLayers);
  s.tag = 9;
  const auto after = s.after;
  const auto push = make_move(MoveKind::kPush, s, kLayers);
  round(*push);
  EXPECT_TRUE(link.accepted.empty()) << "nothing was computed yet";
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    after->publish(layer);
    round(*push);
    ASSERT_FALSE(link.accepted.empty());
    const WorkRequest& last = link.accepted.back();
    EXPECT_EQ(last.op, LinkOp::kWriteWithImmediate);
    EXPECT_EQ(last.immediate, pack_immediate(9, layer));
    uint64_t bytes = 0;
    for (const WorkRequest& r : link.accepted) bytes += r.length;
    EXPECT_EQ(bytes, 100u * 128);
    EXPECT_FALSE(s.into->ready(layer)) << "posted is not done";
    link.complete(1000);
    round(*push);
    EXPECT_TRUE(s.into->ready(layer));
  }
  EXPECT_TRUE(push->finished());
  EXPECT_TRUE(push->ticket()->outcome().ok());
}

TEST_F(OperationTest, ALayerLargerThanTheSendQueueGoesOutInInstalments) {
  ScriptedLink& link = add_link({4, 1 << 20, true});
  MoveSpec s = spec();
  const auto read = make_move(MoveKind::kStageFromPeer, s, kLayers);
  uint64_t bytes = 0;
  for (int i = 0; i < 500 && !read->finished(); ++i) {
    round(*read);
    ASSERT_LE(link.accepted.size(), 4u);
    for (const WorkRequest& r : link.accepted) bytes += r.length;
    link.complete(4);
  }
  EXPECT_TRUE(read->finished());
  EXPECT_EQ(bytes, kLayers * 100u * 128);
  for (uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_EQ(s.into->arrived(layer), 1u);
}

TEST_F(OperationTest, ReadsWaitForTheSourceAndForTheRotation) {
  ScriptedLink& link = add_link();
  MoveSpec s = spec();
  s.after = std::make_shared<LayerStream>(kLayers);
  s.gate = std::make_shared<LayerStream>(kLayers);
  const auto read = make_move(MoveKind::kStageFromPeer, s, kLayers);
  for (uint32_t layer = 0; layer < kLayers; ++layer) s.after->arrive(layer);
  for (int i = 0; i < 5; ++i) {
    round(*read);
    link.complete(1000);
  }
  EXPECT_TRUE(s.into->ready(2));
  EXPECT_FALSE(s.into->ready(3)) << "three slots, none released";
  s.gate->arrive(1);
  for (int i = 0; i < 5; ++i) {
    round(*read);
    link.complete(1000);
  }
  EXPECT_FALSE(s.into->ready(3)) << "layer 3 needs the slot of layer 0";
  s.gate->arrive(0);
  for (int i = 0; i < 5; ++i) {
    round(*read);
    link.complete(1000);
  }
  EXPECT_TRUE(s.into->ready(3) && s.into->ready(4));
  EXPECT_TRUE(read->finished());
}

TEST_F(OperationTest, ABadCompletionFailsTheMoveAfterTheDrainAndNamesTheRange) {
  ScriptedLink& link = add_link();
  MoveSpec s = spec();
  s.slots = acquire(*pool_, 3);
  const auto slots = s.slots;
  const auto read = make_move(MoveKind::kStageFromPeer, s, kLayers);
  read->begin(*pool_, nullptr);
  for (const uint32_t slot : slots) pool_->release(slot);
  round(*read);
  link.drain_allowed = false;
  link.break_at(3, WorkStatus::kRemoteAccess, 7);
  for (int i = 0; i < 5; ++i) round(*read);
  EXPECT_FALSE(read->finished()) << "not drained: memory may still be touched";
  EXPECT_EQ(pool_->available(), 13u);
  link.drain_allowed = true;
  for (int i = 0; i < 3; ++i) round(*read);
  EXPECT_TRUE(read->finished());
  EXPECT_TRUE(s.into->failed());
  EXPECT_NE(s.into->failure().text.find("remote access"), std::string::npos);
  Notifier events;
  read->end(progress_, events);
  EXPECT_EQ(pool_->available(), 16u);
  EXPECT_TRUE(read->ticket()->done());
  EXPECT_EQ(stats_.counters(TrafficKind::kNetworkRead).failures, 1u);
}

TEST_F(OperationTest, ATimeoutWithRequestsOutstandingTakesTheLinkDownFirst) {
  ScriptedLink& link = add_link();
  MoveSpec s = spec();
  s.deadline_ns = now_ns() + 5'000'000;
  const auto read = make_move(MoveKind::kStageFromPeer, s, kLayers);
  round(*read);
  EXPECT_FALSE(link.failed());
  usleep(6000);
  for (int i = 0; i < 3; ++i) round(*read);
  EXPECT_TRUE(link.failed()) << "only a drained link is known to be quiet";
  EXPECT_TRUE(read->finished());
  EXPECT_EQ(read->ticket()->outcome().code, ErrorCode::kTimeout);
  EXPECT_NE(read->ticket()->outcome().text.find("scripted-peer"), std::string::npos);
}

TEST_F(OperationTest, ATimeoutWithNothingOutstandingLeavesTheLinkAlone) {
  ScriptedLink& link = add_link();
  MoveSpec s = spec();
  s.after = std::make_shared<LayerStream>(kLayers);
  s.deadline_ns = now_ns() - 1;
  const auto read = make_move(MoveKind::kStageFromPeer, s, kLayers);
  round(*read);
  EXPECT_TRUE(read->finished());
  EXPECT_FALSE(link.failed());
}

TEST_F(OperationTest, AnAbandonedPushTellsTheReceiverOnce) {
  ScriptedLink& link = add_link();
  MoveSpec s = spec();
  s.after = std::make_shared<LayerStream>(kLayers);
  s.tag = 3;
  const auto push = make_move(MoveKind::kPush, s, kLayers);
  round(*push);
  push->ticket()->cancel();
  for (int i = 0; i < 3; ++i) round(*push);
  ASSERT_EQ(link.accepted.size(), 1u);
  EXPECT_EQ(link.accepted[0].immediate, pack_immediate(3, kGaveUp));
  EXPECT_FALSE(push->finished()) << "the notice is a request like any other";
  link.complete(1);
  round(*push);
  EXPECT_TRUE(push->finished());
  EXPECT_EQ(s.into->failure().code, ErrorCode::kCancelled);
  EXPECT_EQ(stats_.counters(TrafficKind::kNetworkWrite).failures, 0u) << "a cancel is no failure";
}

TEST_F(OperationTest, ACapDelaysTheNextLayerAndSaysWhenToLookAgain) {
  buckets_[static_cast<size_t>(TrafficKind::kDeviceCopy)].set_rate(1'000'000);
  MoveSpec s = spec();
  const auto stage = make_move(MoveKind::kStage, s, kLayers);
  round(*stage);
  EXPECT_TRUE(s.into->ready(0));
  EXPECT_FALSE(s.into->ready(kLayers - 1));
  EXPECT_GT(progress_.wake_at_ns, now_ns());
  EXPECT_LT(progress_.wake_at_ns, in_seconds(1));
  while (!stage->finished()) {
    usleep(1000);
    round(*stage);
  }
  EXPECT_EQ(stats_.counters(TrafficKind::kDeviceCopy).operations, kLayers);
  EXPECT_EQ(stats_.counters(TrafficKind::kDeviceCopy).bytes, kLayers * 100u * 128);
}

TEST_F(OperationTest, AMoveWithoutItsPeerFailsAtOnce) {
  MoveSpec s = spec();
  s.peer = 5;
  const auto push = make_move(MoveKind::kPush, s, kLayers);
  round(*push);
  EXPECT_TRUE(push->finished());
  EXPECT_EQ(push->ticket()->outcome().code, ErrorCode::kPeerLost);
}

TEST_F(OperationTest, ImmediatesCountForTheirReceiveUntilItIsClosed) {
  ScriptedLink& link = add_link();
  const auto stream = std::make_shared<LayerStream>(kLayers, 2);
  const uint32_t tag = peers_.open_receive(stream);
  for (const uint32_t layer : {0u, 0u, 4u}) link.immediates.push_back(pack_immediate(tag, layer));
  link.immediates.push_back(pack_immediate(tag, 900));  // no such layer: ignored
  peers_.poll();
  EXPECT_TRUE(stream->ready(0));
  EXPECT_EQ(stream->arrived(4), 1u);
  peers_.close_receive(tag);
  link.immediates.push_back(pack_immediate(tag, 4));
  link.immediates.push_back(pack_immediate(tag, kGaveUp));
  peers_.poll();
  EXPECT_EQ(stream->arrived(4), 1u);
  EXPECT_FALSE(stream->failed());
}

TEST_F(OperationTest, TagsOfOpenReceivesAreNeverGivenTwice) {
  std::vector<uint32_t> tags;
  const auto stream = std::make_shared<LayerStream>(1);
  for (int i = 0; i < 1000; ++i) tags.push_back(peers_.open_receive(stream));
  std::sort(tags.begin(), tags.end());
  EXPECT_EQ(std::unique(tags.begin(), tags.end()), tags.end());
}

TEST_F(OperationTest, ANewerPeerOfTheSameNameReplacesTheOlder) {
  ScriptedLink& old_link = add_link();
  const PeerId old_id = peer_;
  add_link();
  EXPECT_EQ(peers_.wait("scripted-peer", now_ns()), peer_);
  EXPECT_NE(old_id, peer_);
  old_link.fail();
  peers_.poll();
  EXPECT_FALSE(peers_.alive(old_id));
  EXPECT_TRUE(peers_.alive(peer_));
  EXPECT_FALSE(peers_.alive(99));
  EXPECT_THROW(peers_.wait("nobody", now_ns()), Error);
}

// ------------------------------------------------------------------------------ load and persist

class StorageOperationTest : public OperationTest {
 protected:
  StorageOperationTest()
      : store_(std::make_shared<BlockStore>(directory_.path() + "/s", make_key(1), kLayout)) {}

  void use(std::function<int(const IoRequest&)> fault) {
    queue_ = std::make_unique<FaultyQueue>(std::move(fault));
    io_ = std::make_unique<StoreIo>(*store_, *queue_, *pool_);
    progress_.store_io = io_.get();
  }
  void run(Operation& operation) {
    const int64_t deadline = in_seconds(10);
    while (!operation.finished() && now_ns() < deadline) {
      progress_.now_ns = now_ns();
      io_->poll();
      operation.check_limits(progress_);
      operation.step(progress_);
      queue_->submit();
    }
    ASSERT_TRUE(operation.finished());
  }
  std::vector<BlockId> stored(uint32_t count) {
    const auto chain = make_chain(make_key(1), count);
    const auto slots = acquire(*pool_, count);
    store_->put(chain, *pool_, slots);
    for (const uint32_t slot : slots) pool_->release(slot);
    return chain;
  }

  TemporaryDirectory directory_;
  std::shared_ptr<BlockStore> store_;
  std::unique_ptr<FaultyQueue> queue_;
  std::unique_ptr<StoreIo> io_;
};

TEST_F(StorageOperationTest, AnyErrorOfAnyReadMakesItsBlockAMissWithTheErrno) {
  const auto chain = stored(4);
  for (const int error : {EIO, ENOENT, EMFILE, ESTALE, EACCES}) {
    for (int at = 0; at < 8; ++at) {
      int count = 0;
      use([&](const IoRequest& r) {
        const bool reads = r.op == IoOp::kOpen || r.op == IoOp::kRead;
        return reads && count++ == at ? -error : 0;
      });
      auto stream = std::make_shared<LayerStream>(kLayers, 4);
      const auto load = make_load({chain, acquire(*pool_, 4), 1, stream}, kLayout, stats_);
      run(*load);
      EXPECT_LT(load->ticket()->blocks(), 4u) << error << " at " << at;
      EXPECT_TRUE(stream->failed());
      EXPECT_EQ(stream->failure().sys_errno, error);
      for (uint32_t slot = 0; slot < 16; ++slot) pool_->release(slot);
      for (const BlockId& id : chain) EXPECT_TRUE(store_->contains(id)) << "the file is still fine";
    }
  }
  EXPECT_EQ(stats_.pending_read_bytes.load(), 0u);
}

TEST_F(StorageOperationTest, AFailureStopsFurtherReadsOfTheChain) {
  const auto chain = stored(8);
  int reads = 0;
  use([&](const IoRequest& r) {
    if (r.op != IoOp::kRead) return 0;
    return ++reads == 1 ? -EIO : 0;
  });
  auto stream = std::make_shared<LayerStream>(kLayers, 8);
  const auto load = make_load({chain, acquire(*pool_, 8), kLayers, stream}, kLayout, stats_);
  run(*load);
  EXPECT_LE(reads, 8) << "no second part is read for a stream that can't complete";
}

TEST_F(StorageOperationTest, AnEmptyLoadAndAnEmptyPersistFinishAtOnce) {
  use([](const IoRequest&) { return 0; });
  const auto load = make_load({{}, {}, 1, nullptr}, kLayout, stats_);
  run(*load);
  EXPECT_TRUE(load->ticket()->outcome().ok());
  const auto persist = make_persist({{}, {}}, store_, 0);
  run(*persist);
  EXPECT_EQ(persist->ticket()->blocks(), 0u);
}

TEST_F(StorageOperationTest, APersistReportsWhatItPublishedAndWhatWasThere) {
  stored(3);
  use([](const IoRequest&) { return 0; });
  const auto chain = make_chain(make_key(1), 6);
  const auto persist = make_persist({chain, acquire(*pool_, 6)}, store_, 0);
  run(*persist);
  EXPECT_EQ(persist->ticket()->blocks(), 6u);
  EXPECT_EQ(persist->ticket()->fresh(), (std::vector<bool>{false, false, false, true, true, true}));
  EXPECT_EQ(store_->lookup(chain), 6u);
}

TEST_F(StorageOperationTest, AFullDiskFailsThePersistOnceAndKeepsWhatWasWritten) {
  int writes = 0;
  use([&](const IoRequest& r) { return r.op == IoOp::kWrite && ++writes > 2 ? -ENOSPC : 0; });
  const auto chain = make_chain(make_key(1), 6);
  const auto persist = make_persist({chain, acquire(*pool_, 6)}, store_, 0);
  run(*persist);
  EXPECT_EQ(persist->ticket()->outcome().code, ErrorCode::kNoSpace);
  EXPECT_EQ(persist->ticket()->blocks(), 2u);
  EXPECT_EQ(stats_.counters(TrafficKind::kStorageWrite).failures, 1u);
  EXPECT_GE(store_->stats().refused_full, 1u);
  const auto there = [&](const BlockId& id) { return store_->contains(id); };
  EXPECT_EQ(std::count_if(chain.begin(), chain.end(), there), 2) << "which two, threads decide";
}

TEST_F(StorageOperationTest, ACancelledPersistPublishesNothingAfterwards) {
  use([](const IoRequest&) { return 0; });
  const auto chain = make_chain(make_key(1), 6);
  const auto persist = make_persist({chain, acquire(*pool_, 6)}, store_, 0);
  persist->ticket()->cancel();
  run(*persist);
  EXPECT_EQ(persist->ticket()->outcome().code, ErrorCode::kCancelled);
  EXPECT_EQ(persist->ticket()->blocks(), 0u) << "it was cancelled before its first step";
  EXPECT_EQ(store_->lookup(chain), persist->ticket()->blocks());
}

}  // namespace
}  // namespace kvtransfer
