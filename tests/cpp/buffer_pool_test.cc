#include "kvtransfer/buffer_pool.h"

#include <set>
#include <thread>

#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

std::shared_ptr<MemoryRegion> region_of(size_t bytes) {
  return std::make_shared<MemoryRegion>(bytes, RegionKind::kAnonymous, HugePages::kOff);
}

TEST(BufferPool, SlotsAreAlignedDisjointAndInsideTheRegion) {
  BufferPool pool(region_of(10 * 12288 + 100), 4096, 5000);
  EXPECT_EQ(pool.slot_bytes(), 4096u + 8192u);
  EXPECT_EQ(pool.num_slots(), 10u);
  for (uint32_t i = 0; i < pool.num_slots(); ++i) {
    EXPECT_EQ(pool.slot_offset(i) % 4096, 0u);
    EXPECT_EQ(pool.payload_offset(i), pool.slot_offset(i) + 4096);
    EXPECT_LE(pool.slot_offset(i) + pool.slot_bytes(), pool.region()->bytes());
  }
}

TEST(BufferPool, ASlotIsFreeAgainOnlyWhenItsLastReferenceIsReleased) {
  BufferPool pool(region_of(4 * 4096), 0, 4096);
  std::vector<uint32_t> slots(4);
  ASSERT_TRUE(pool.acquire(slots));
  pool.retain(slots[0]);
  EXPECT_TRUE(pool.release(slots[0]));
  EXPECT_EQ(pool.available(), 0u);
  EXPECT_TRUE(pool.release(slots[0]));
  EXPECT_EQ(pool.available(), 1u);
  EXPECT_EQ(pool.low_watermark(), 0u);
}

TEST(BufferPool, ReleasingAFreeOrUnknownSlotIsRefusedAndCounted) {
  BufferPool pool(region_of(2 * 4096), 0, 4096);
  std::vector<uint32_t> slots(1);
  ASSERT_TRUE(pool.acquire(slots));
  EXPECT_TRUE(pool.release(slots[0]));
  EXPECT_FALSE(pool.release(slots[0]));
  EXPECT_FALSE(pool.release(99));
  EXPECT_EQ(pool.bad_releases(), 2u);
  EXPECT_EQ(pool.available(), 2u);
}

TEST(BufferPool, RefusesRegionsThatHoldNoSlotAndUnalignedHeaders) {
  EXPECT_THROW(BufferPool(region_of(4096), 4096, 1), Error);
  EXPECT_THROW(BufferPool(region_of(1 << 20), 100, 4096), Error);
  EXPECT_THROW(BufferPool(region_of(1 << 20), 4096, 0), Error);
  EXPECT_THROW(BufferPool(nullptr, 4096, 4096), Error);
}

TEST(BufferPool, TenThreadsNeverShareASlotAndLoseNone) {
  BufferPool pool(region_of(64 * 4096), 0, 4096);
  std::vector<std::atomic<int>> owner(64);
  std::atomic<int> violations{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 10; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(id);
      for (int round = 0; round < 2000; ++round) {
        std::vector<uint32_t> slots(1 + random() % 12);
        if (!pool.acquire(slots)) continue;
        for (const uint32_t slot : slots) {
          violations += owner[slot].exchange(id) != 0;
          pool.slot_data(slot)[0] = static_cast<uint8_t>(id);  // a race would show under TSan
        }
        for (const uint32_t slot : slots) {
          pool.retain(slot);
          pool.release(slot);
          violations += pool.slot_data(slot)[0] != id || owner[slot].exchange(0) != id;
          violations += !pool.release(slot);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(violations.load(), 0);
  EXPECT_EQ(pool.available(), 64u);
  EXPECT_EQ(pool.bad_releases(), 0u);
  std::vector<uint32_t> all(64);
  ASSERT_TRUE(pool.acquire(all));
  EXPECT_EQ(std::set<uint32_t>(all.begin(), all.end()).size(), 64u);
}

}  // namespace
}  // namespace kvtransfer
