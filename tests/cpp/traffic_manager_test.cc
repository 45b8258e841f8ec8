#include "kvtransfer/traffic_manager.h"

#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "engine_fixture.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

class TrafficManagerTest : public ::testing::Test {
 protected:
  std::shared_ptr<BlockStore> open_store() {
    return std::make_shared<BlockStore>(directory_.path() + "/store", root_,
                                        BlockLayout(kLayers, kBlockTokens, {256, 256}));
  }
  TemporaryDirectory directory_;
  BlockKey root_ = make_key(1);
};

TEST_F(TrafficManagerTest, PersistThenLoadBringsBackTheBytesAndCountsThem) {
  const auto store = open_store();
  Engine engine("pl", kLayers, store);
  const auto chain = make_chain(root_, 8);
  const auto from = acquire(*engine.pool, 8);
  engine.fill_slots(from, 5);
  const auto persisted = engine.manager->persist({chain, from, 1});
  ASSERT_TRUE(persisted->wait(in_seconds(10)));
  EXPECT_EQ(persisted->blocks(), 8u);
  EXPECT_EQ(persisted->fresh(), std::vector<bool>(8, true));
  const auto into = acquire(*engine.pool, 8);
  const auto stream = engine.manager->make_stream(8);
  const auto loaded = engine.manager->load({chain, into, kLayers, stream, in_seconds(20), 2});
  ASSERT_TRUE(wait_all(*stream));
  ASSERT_TRUE(loaded->wait(in_seconds(10)));
  EXPECT_EQ(loaded->blocks(), 8u);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(payload_of(*engine.pool, into[i], engine.layout),
              payload_of(*engine.pool, from[i], engine.layout));
  }
  const auto counters = engine.manager->counters(TrafficKind::kStorageRead);
  EXPECT_EQ(counters.bytes, 8 * engine.layout.full_block_bytes());
  EXPECT_EQ(engine.manager->read_queue_tokens(), 0u);
}

TEST_F(TrafficManagerTest, AStoreInMemoryIsServedByThreadsUnlessAsked) {
  const TemporaryDirectory memory("/dev/shm");
  const BlockLayout layout(kLayers, kBlockTokens, {256, 256});
  const auto store = std::make_shared<BlockStore>(memory.path(), root_, layout);
  if (!store->in_memory()) GTEST_SKIP() << "/dev/shm is no tmpfs here";
  Engine automatic("sm", kLayers, store);
  EXPECT_EQ(automatic.manager->io_backend(), "threads");
  EXPECT_NE(automatic.manager->io_fallback_reason().find(memory.path()), std::string::npos);
  EXPECT_FALSE(open_store()->in_memory());
}

TEST_F(TrafficManagerTest, ReadQueueTokensFallAsBlocksLand) {
  const auto store = open_store();
  TrafficOptions options;
  options.bytes_per_second[0] = 400'000;
  Engine engine("rq", kLayers, store, options);
  const auto chain = make_chain(root_, 8);
  const auto slots = acquire(*engine.pool, 8);
  ASSERT_TRUE(engine.manager->persist({chain, slots, 1})->wait(in_seconds(10)));
  const auto stream = engine.manager->make_stream(8);
  const auto ticket = engine.manager->load({chain, slots, kLayers, stream, in_seconds(20), 2});
  EXPECT_GT(engine.manager->read_queue_tokens(), 4 * kBlockTokens);
  ASSERT_EQ(stream->wait(0, in_seconds(10)), WaitResult::kReady);
  EXPECT_FALSE(stream->ready(kLayers - 1)) << "the cap makes the layers come one after another";
  engine.manager->set_cap(TrafficKind::kStorageRead, 0);
  ASSERT_TRUE(ticket->wait(in_seconds(10)));
  EXPECT_EQ(engine.manager->read_queue_tokens(), 0u);
}

// The PE path's device side: three layer slots, so that staging must follow the computation.
TEST_F(TrafficManagerTest, StagingFollowsTheRotationOfTheLayerSlots) {
  Engine engine("st", 3);
  const auto slots = acquire(*engine.pool, kBlocks);
  engine.fill_slots(slots, 9);
  const auto ready = engine.manager->make_stream(1), released = engine.manager->make_stream(1);
  MoveSpec spec = engine.move(engine.starts(slots));
  spec.slots = slots;
  spec.into = ready;
  spec.gate = released;
  const auto ticket = engine.manager->stage(spec);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_EQ(ready->wait(layer, in_seconds(5)), WaitResult::kReady);
    if (layer + 3 < kLayers) {
      EXPECT_EQ(ready->wait(layer + 3, in_seconds(0.01)), WaitResult::kTimeout)
          << "its slot is still taken by layer " << layer;
    }
    for (uint32_t t = 0; t < kTokens; t += 7) {
      std::vector<uint8_t> wanted;
      const auto block = payload_of(*engine.pool, slots[t / kBlockTokens], engine.layout);
      for (uint32_t plane = 0; plane < 2; ++plane) {
        const auto at =
            block.begin() + static_cast<long>(engine.layout.layer_offset(layer) +
                                              plane * kBlockTokens * 256 + t % kBlockTokens * 256);
        wanted.insert(wanted.end(), at, at + 256);
      }
      ASSERT_EQ(engine.token(layer, t), wanted) << "layer " << layer << " token " << t;
    }
    released->publish(layer);
  }
  EXPECT_TRUE(ticket->wait(in_seconds(5)));
}

TEST_F(TrafficManagerTest, ABadBlockFailsTheStreamWithItsNameAndTheTicketKeepsTheGoodPrefix) {
  const auto store = open_store();
  Engine engine("bad", kLayers, store);
  const auto chain = make_chain(root_, 6);
  const auto slots = acquire(*engine.pool, 6);
  ASSERT_TRUE(engine.manager->persist({chain, slots, 1})->wait(in_seconds(10)));
  std::filesystem::resize_file(store->path_of(chain[4]), 4096);
  const auto stream = engine.manager->make_stream(6);
  const auto ticket = engine.manager->load({chain, slots, 1, stream, in_seconds(20), 2});
  EXPECT_EQ(stream->wait(kLayers - 1, in_seconds(5)), WaitResult::kFailed);
  EXPECT_EQ(stream->failure().code, ErrorCode::kCorrupt);
  EXPECT_NE(stream->failure().text.find("block 4 of 6"), std::string::npos);
  ASSERT_TRUE(ticket->wait(in_seconds(5)));
  EXPECT_EQ(ticket->blocks(), 4u);
}

TEST_F(TrafficManagerTest, ADeadlineEndsAWaitWithATypedErrorAndGivesTheSlotsBack) {
  Engine engine("dl", 3);
  auto slots = acquire(*engine.pool, kBlocks);
  const auto never = engine.manager->make_stream(1), into = engine.manager->make_stream(1);
  MoveSpec spec = engine.move(engine.starts(slots));
  spec.slots = slots;
  spec.after = never;
  spec.into = into;
  spec.deadline_ns = in_seconds(0.05);
  const auto ticket = engine.manager->stage(spec);
  for (const uint32_t slot : slots) engine.pool->release(slot);
  EXPECT_EQ(engine.pool->available(), 14u) << "the operation still holds them";
  EXPECT_EQ(into->wait(0, in_seconds(5)), WaitResult::kFailed);
  EXPECT_EQ(into->failure().code, ErrorCode::kTimeout);
  ASSERT_TRUE(ticket->wait(in_seconds(5)));
  EXPECT_EQ(ticket->outcome().code, ErrorCode::kTimeout);
  EXPECT_EQ(engine.pool->available(), 24u);
}

TEST_F(TrafficManagerTest, CancelReturnsOnlyWhenNothingIsInFlight) {
  const auto store = open_store();
  TrafficOptions options;
  options.bytes_per_second[0] = 100'000;
  Engine engine("cn", kLayers, store, options);
  const auto chain = make_chain(root_, 8);
  const auto slots = acquire(*engine.pool, 8);
  ASSERT_TRUE(engine.manager->persist({chain, slots, 1})->wait(in_seconds(10)));
  const auto stream = engine.manager->make_stream(8);
  const auto ticket = engine.manager->load({chain, slots, kLayers, stream, in_seconds(60), 2});
  ticket->cancel();
  EXPECT_TRUE(ticket->wait(in_seconds(10)));
  EXPECT_EQ(ticket->outcome().code, ErrorCode::kCancelled);
  EXPECT_TRUE(stream->failed());
  for (const uint32_t slot : slots) EXPECT_TRUE(engine.pool->release(slot));
  EXPECT_EQ(engine.pool->available(), 24u);
}

TEST_F(TrafficManagerTest, RefusesAtSubmissionWhatCouldOnlyFailLater) {
  Engine engine("re", 3);
  const auto slots = acquire(*engine.pool, kBlocks);
  const auto good = engine.starts(slots);
  MoveSpec spec = engine.move(good);
  spec.slots = {99};
  EXPECT_THROW(engine.manager->stage(spec), Error);
  spec = engine.move({engine.pool->region()->bytes() - 10});
  spec.num_tokens = 4;
  EXPECT_THROW(engine.manager->stage(spec), Error);
  spec = engine.move(good);
  spec.num_tokens = 1000;
  EXPECT_THROW(engine.manager->stage(spec), Error);
  spec = engine.move(good);
  spec.into = std::make_shared<LayerStream>(2);
  EXPECT_THROW(engine.manager->stage(spec), Error);
  spec = engine.move(good);
  spec.cache = nullptr;
  EXPECT_THROW(engine.manager->push(spec), Error);
  EXPECT_THROW(engine.manager->load({make_chain(root_, 1), {0}, 1, nullptr}), Error);
  spec = engine.move(good);
  spec.peer = 77;
  const auto ticket = engine.manager->push(spec);
  ASSERT_TRUE(ticket->wait(in_seconds(5)));
  EXPECT_EQ(ticket->outcome().code, ErrorCode::kPeerLost);
}

TEST_F(TrafficManagerTest, TheEventDescriptorTellsOfReadyLayersAndFinishedTickets) {
  Engine engine("ev", kLayers);
  const auto slots = acquire(*engine.pool, kBlocks);
  engine.manager->drain_events();
  MoveSpec spec = engine.move(engine.starts(slots));
  spec.into = engine.manager->make_stream(1);
  const auto ticket = engine.manager->stage(spec);
  const int64_t deadline = in_seconds(10);
  while (!ticket->done() && now_ns() < deadline) {
    pollfd ready{engine.manager->event_fd(), POLLIN, 0};
    ASSERT_GT(poll(&ready, 1, 5000), 0);
    engine.manager->drain_events();
  }
  EXPECT_TRUE(ticket->done());
}

TEST_F(TrafficManagerTest, DestructionWithWorkUnderWayDrainsEverything) {
  const auto store = open_store();
  std::shared_ptr<BufferPool> pool;
  std::shared_ptr<Ticket> load, stage;
  {
    TrafficOptions options;
    options.bytes_per_second[0] = 50'000;
    Engine engine("ds", 3, store, options);
    pool = engine.pool;
    const auto chain = make_chain(root_, 8);
    const auto slots = acquire(*engine.pool, 8);
    ASSERT_TRUE(engine.manager->persist({chain, slots, 1})->wait(in_seconds(10)));
    load = engine.manager->load({chain, slots, kLayers, nullptr, in_seconds(60), 2});
    MoveSpec spec = engine.move(engine.starts(slots), 0, 100);
    spec.slots = slots;
    spec.after = engine.manager->make_stream(1);
    stage = engine.manager->stage(spec);
    for (const uint32_t slot : slots) engine.pool->release(slot);
  }
  EXPECT_TRUE(load->done() && stage->done());
  EXPECT_EQ(pool->available(), 24u);
}

// The wake-up of a cancel and the one of the destructor may meet in the middle of a drain.
TEST_F(TrafficManagerTest, DestructionRightAfterACancelNeverSleepsThroughIt) {
  const BlockLayout layout(kLayers, kBlockTokens, {256, 256});
  const auto pool = make_pool(layout, 4);
  for (int round = 0; round < 400; ++round) {
    TrafficManager manager(nullptr, pool, nullptr, layout, {});
    MoveSpec serve;
    serve.after = manager.make_stream(1);
    const auto ticket = manager.serve(serve);
    std::thread other([&] { ticket->cancel(); });
    if (round % 3 == 0) usleep(round % 50);
    other.join();
  }
}

TEST_F(TrafficManagerTest, ManyThreadsMaySubmitAtOnce) {
  Engine engine("mt", kLayers);
  std::vector<std::thread> threads;
  std::atomic<int> finished{0};
  for (int id = 0; id < 6; ++id) {
    threads.emplace_back([&] {
      for (int i = 0; i < 40; ++i) {
        std::vector<uint32_t> slots(3);
        if (!engine.pool->acquire(slots)) continue;
        MoveSpec spec = engine.move(engine.starts(slots), 0, 40);
        spec.slots = slots;
        const auto ticket = engine.manager->stage(spec);
        for (const uint32_t slot : slots) engine.pool->release(slot);
        finished += ticket->wait(in_seconds(10)) ? 1 : 0;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(finished.load(), 0);
  EXPECT_EQ(engine.pool->available(), 24u);
  EXPECT_EQ(engine.pool->bad_releases(), 0u);
}

TEST_F(TrafficManagerTest, TraceRecordsEveryPieceWithItsLayer) {
  TrafficOptions options;
  options.trace = true;
  Engine engine("tr", kLayers, nullptr, options);
  const auto slots = acquire(*engine.pool, kBlocks);
  MoveSpec spec = engine.move(engine.starts(slots));
  spec.trace_id = 77;
  ASSERT_TRUE(engine.manager->stage(spec)->wait(in_seconds(5)));
  const auto events = engine.manager->take_trace();
  ASSERT_EQ(events.size(), kLayers);
  for (uint32_t l = 0; l < kLayers; ++l) {
    EXPECT_EQ(events[l].layer, static_cast<int32_t>(l));
    EXPECT_EQ(events[l].trace_id, 77u);
    EXPECT_LE(events[l].begin_ns, events[l].end_ns);
  }
  EXPECT_TRUE(engine.manager->take_trace().empty());
}

}  // namespace
}  // namespace kvtransfer
