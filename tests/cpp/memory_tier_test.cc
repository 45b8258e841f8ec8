#include "store/memory_tier.h"

#include <map>

#include "kvtransfer/traffic_manager.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

constexpr uint64_t kBytes = 4096;

std::vector<uint8_t> image(uint64_t seed) {
  std::vector<uint8_t> bytes(kBytes);
  fill_random(bytes.data(), kBytes, seed);
  return bytes;
}

TEST(MemoryTier, ABlockComesInWithItsSecondReadAndNotWithItsFirst) {
  MemoryTier tier(2, kBytes);
  const BlockKey key = make_key(1);
  EXPECT_FALSE(tier.pin(key));
  tier.offer(key, image(1).data(), false);
  EXPECT_FALSE(tier.contains(key));
  EXPECT_FALSE(tier.pin(key));
  tier.offer(key, image(1).data(), false);
  const auto slot = tier.pin(key);
  ASSERT_TRUE(slot);
  EXPECT_EQ(memcmp(tier.data(*slot), image(1).data(), kBytes), 0);
  EXPECT_EQ(tier.stats().hits, 1u);
  EXPECT_EQ(tier.stats().misses, 2u);
}

TEST(MemoryTier, AScanOfColdBlocksDoesNotDriveTheHotOnesOut) {
  MemoryTier tier(4, kBytes);
  for (uint64_t i = 0; i < 4; ++i) tier.offer(make_key(i), image(i).data(), true);
  for (uint64_t i = 100; i < 1000; ++i) {
    EXPECT_FALSE(tier.pin(make_key(i)));
    tier.offer(make_key(i), image(i).data(), false);
  }
  for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(tier.contains(make_key(i)));
}

TEST(MemoryTier, PinnedBlocksStayAndKeepTheirBytes) {
  MemoryTier tier(2, kBytes);
  tier.offer(make_key(1), image(1).data(), true);
  const auto slot = tier.pin(make_key(1));
  ASSERT_TRUE(slot);
  for (uint64_t i = 2; i < 20; ++i) tier.offer(make_key(i), image(i).data(), true);
  EXPECT_EQ(memcmp(tier.data(*slot), image(1).data(), kBytes), 0);
  tier.unpin(*slot);
  for (uint64_t i = 20; i < 22; ++i) tier.offer(make_key(i), image(i).data(), true);
  EXPECT_FALSE(tier.contains(make_key(1)));
}

TEST(MemoryTier, RandomHistoriesNeverHoldAnotherBlocksBytes) {
  MemoryTier tier(8, kBytes);
  std::mt19937 random(2);
  std::map<uint32_t, uint64_t> pinned;
  for (int step = 0; step < 20'000; ++step) {
    const uint64_t block = random() % 40;
    if (random() % 2 == 0) {
      tier.offer(make_key(block), image(block).data(), random() % 4 == 0);
    } else if (const auto slot = tier.pin(make_key(block))) {
      ASSERT_EQ(memcmp(tier.data(*slot), image(block).data(), kBytes), 0);
      if (random() % 2 == 0 || pinned.contains(*slot) || pinned.size() > 3) {
        tier.unpin(*slot);
      } else {
        pinned[*slot] = block;
      }
    }
    if (!pinned.empty() && random() % 8 == 0) {
      const auto [slot, held] = *pinned.begin();
      ASSERT_EQ(memcmp(tier.data(slot), image(held).data(), kBytes), 0);
      tier.unpin(slot);
      pinned.erase(pinned.begin());
    }
    ASSERT_LE(tier.stats().blocks, 8u);
  }
  EXPECT_GT(tier.stats().evicted, 0u);
}

class TierTrafficTest : public ::testing::TestWithParam<uint32_t> {  // parts a block is read in
 protected:
  static constexpr uint32_t kBlocks = 6;
  TierTrafficTest() {
    TrafficOptions options;
    options.memory_blocks = 2 * kBlocks;
    manager_ = std::make_unique<TrafficManager>(store_, pool_, nullptr, layout_, options);
    const auto slots = acquire(*pool_, kBlocks);
    for (uint32_t i = 0; i < kBlocks; ++i) {
      fill_random(pool_->region()->data() + pool_->payload_offset(slots[i]),
                  layout_.full_block_bytes(), i);
    }
    EXPECT_EQ(store_->put(chain_, *pool_, slots), kBlocks);
    for (const uint32_t slot : slots) pool_->release(slot);
  }
  // Loads the chain and compares all of it; returns how many blocks were good.
  uint32_t load() {
    const auto slots = acquire(*pool_, kBlocks);
    memset(pool_->region()->data(), 0, pool_->region()->bytes());
    const auto stream = manager_->make_stream(kBlocks);
    const auto ticket = manager_->load({chain_, slots, GetParam(), stream, in_seconds(20)});
    EXPECT_TRUE(ticket->wait(in_seconds(20)));
    for (uint32_t i = 0; i < ticket->blocks() && ticket->outcome().ok(); ++i) {
      std::vector<uint8_t> wanted(layout_.full_block_bytes());
      fill_random(wanted.data(), wanted.size(), i);
      EXPECT_EQ(payload_of(*pool_, slots[i], layout_), wanted) << i;
    }
    for (uint32_t layer = 0; ticket->outcome().ok() && layer < layout_.num_layers(); ++layer) {
      EXPECT_TRUE(stream->ready(layer));
    }
    for (const uint32_t slot : slots) pool_->release(slot);
    return ticket->blocks();
  }
  uint64_t storage_bytes() { return manager_->counters(TrafficKind::kStorageRead).bytes; }

  const BlockLayout layout_{4, 16, {256, 256}};
  const BlockKey root_ = make_key(1);
  const std::vector<BlockId> chain_ = make_chain(root_, kBlocks);
  TemporaryDirectory directory_;
  std::shared_ptr<BlockStore> store_ =
      std::make_shared<BlockStore>(directory_.path() + "/s", root_, layout_);
  std::shared_ptr<BufferPool> pool_ = make_pool(layout_, kBlocks + 3);
  std::unique_ptr<TrafficManager> manager_;
};

TEST_P(TierTrafficTest, HotBlocksAreReadFromTheStoreTwiceAndNeverAgain) {
  const uint64_t once = kBlocks * layout_.full_block_bytes();
  for (uint64_t round = 1; round <= 5; ++round) {
    EXPECT_EQ(load(), kBlocks);
    EXPECT_EQ(storage_bytes(), std::min<uint64_t>(round, 2) * once) << round;
  }
  EXPECT_EQ(manager_->memory_tier_stats().hits, 3 * kBlocks);
}

TEST_P(TierTrafficTest, APrefetchedChainIsThereForItsFirstLoad) {
  const auto ticket = manager_->prefetch(chain_);
  ASSERT_TRUE(ticket->wait(in_seconds(20)));
  EXPECT_EQ(ticket->blocks(), kBlocks);
  EXPECT_EQ(load(), kBlocks);
  EXPECT_EQ(manager_->memory_tier_stats().hits, kBlocks);
  EXPECT_EQ(storage_bytes(), 0u) << "what the engine waited for came from memory";
  EXPECT_EQ(pool_->available(), pool_->num_slots());
}

TEST_P(TierTrafficTest, PartOfAChainInMemoryAndTheRestInTheStoreMakeOneStream) {
  for (const auto& range : {std::pair{0, 1}, {2, 2}, {5, 1}}) {
    ASSERT_TRUE(
        manager_
            ->prefetch({chain_.begin() + range.first, chain_.begin() + range.first + range.second})
            ->wait(in_seconds(20)));
  }
  EXPECT_EQ(load(), kBlocks);
  EXPECT_EQ(manager_->memory_tier_stats().hits, 4u);
}

TEST_P(TierTrafficTest, APrefetchEndsAtTheFirstBlockThatIsNotThereAndWithoutAnError) {
  std::filesystem::remove(store_->path_of(chain_[4]));
  const auto ticket = manager_->prefetch(chain_);
  ASSERT_TRUE(ticket->wait(in_seconds(20)));
  EXPECT_TRUE(ticket->outcome().ok());
  EXPECT_EQ(ticket->blocks(), 4u);
}

TEST_P(TierTrafficTest, APrefetchWaitsForPoolSlotsAndCanBeCancelled) {
  const auto all = acquire(*pool_, pool_->num_slots());
  const auto ticket = manager_->prefetch(chain_);
  EXPECT_FALSE(ticket->wait(in_seconds(0.02)));
  ticket->cancel();
  ASSERT_TRUE(ticket->wait(in_seconds(20)));
  EXPECT_EQ(ticket->outcome().code, ErrorCode::kCancelled);
  for (const uint32_t slot : all) pool_->release(slot);
}

INSTANTIATE_TEST_SUITE_P(Parts, TierTrafficTest, ::testing::Values(1u, 4u));

TEST(TierTraffic, APrefetchWithoutATierIsRefused) {
  const TemporaryDirectory directory;
  const BlockLayout layout(2, 8, {64});
  const auto store = std::make_shared<BlockStore>(directory.path() + "/s", make_key(1), layout);
  TrafficManager manager(store, make_pool(layout, 2), nullptr, layout, {});
  EXPECT_THROW(manager.prefetch({}), Error);
  EXPECT_EQ(manager.memory_tier_stats().capacity, 0u);
}

}  // namespace
}  // namespace kvtransfer
