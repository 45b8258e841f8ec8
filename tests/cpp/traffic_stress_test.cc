// Many operations at once, cancelled, late or failing at random: whatever happens, tickets end,
// bytes that were reported are right, and every slot returns to its pool.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "kvtransfer/traffic_manager.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

const BlockLayout kLayout(4, 16, {256, 256});
constexpr uint32_t kChains = 6, kLength = 4;

std::shared_ptr<PagedCache> make_cache(uint64_t region_bytes) {
  const uint64_t plane = 16 * 16 * 256;
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < 4; ++l) {
    layers.push_back({l * 2 * plane, 16 * 256, {{0, 256, 256}, {plane, 256, 256}}});
  }
  return std::make_shared<PagedCache>(region_bytes, 16, 16, layers);
}

void fill_block(BufferPool& pool, uint32_t slot, const BlockKey& key) {
  uint64_t seed;
  std::memcpy(&seed, key.data(), sizeof seed);
  fill_random(pool.region()->data() + pool.payload_offset(slot), kLayout.full_block_bytes(), seed);
}

bool holds_block(const BufferPool& pool, uint32_t slot, const BlockKey& key) {
  std::vector<uint8_t> wanted(kLayout.full_block_bytes());
  uint64_t seed;
  std::memcpy(&seed, key.data(), sizeof seed);
  fill_random(wanted.data(), wanted.size(), seed);
  return payload_of(pool, slot, kLayout) == wanted;
}

class TrafficStressTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  TrafficStressTest()
      : store_(std::make_shared<BlockStore>(directory_.path() + "/s", root_, kLayout)),
        pool_(make_pool(kLayout, 40)),
        device_(std::make_shared<MemoryRegion>(4 * 2 * 16 * 16 * 256, RegionKind::kShared,
                                               HugePages::kOff)),
        cache_(make_cache(device_->bytes())) {
    TrafficOptions options;
    options.io.backend = GetParam();
    options.io.depth = 8;
    manager_ = std::make_shared<TrafficManager>(store_, pool_, device_, kLayout, options);
    for (uint32_t chain = 0; chain < kChains; ++chain) {
      chains_.push_back(make_chain(root_, kLength, chain));
    }
  }

  void store_everything() {
    for (const auto& chain : chains_) {
      const auto slots = acquire(*pool_, kLength);
      for (uint32_t i = 0; i < kLength; ++i) fill_block(*pool_, slots[i], chain[i].key);
      const auto ticket = manager_->persist({chain, slots});
      ASSERT_TRUE(ticket->wait(in_seconds(10)));
      ASSERT_EQ(ticket->blocks(), kLength);
      for (const uint32_t slot : slots) pool_->release(slot);
    }
  }

  TemporaryDirectory directory_;
  BlockKey root_ = make_key(5);
  std::shared_ptr<BlockStore> store_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<MemoryRegion> device_;
  std::shared_ptr<PagedCache> cache_;
  std::shared_ptr<TrafficManager> manager_;
  std::vector<std::vector<BlockId>> chains_;
};

TEST_P(TrafficStressTest, ConcurrentLoadsWithRandomCancelsAreRightOrCancelled) {
  store_everything();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0}, finished{0}, cancelled{0};
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937_64 random(id);
      for (int round = 0; round < 40; ++round) {
        std::vector<uint32_t> slots(kLength);
        if (!pool_->acquire(slots)) continue;
        const auto& chain = chains_[random() % kChains];
        const auto stream = manager_->make_stream(kLength);
        const uint32_t parts = 1 + random() % 4;
        const auto ticket = manager_->load({chain, slots, parts, stream, in_seconds(20)});
        const bool cancel = random() % 3 == 0;
        if (cancel) ticket->cancel();
        wrong += !ticket->wait(in_seconds(20));
        if (ticket->outcome().ok()) {
          ++finished;
          for (uint32_t i = 0; i < kLength; ++i)
            wrong += !holds_block(*pool_, slots[i], chain[i].key);
          for (uint32_t layer = 0; layer < 4; ++layer) wrong += !stream->ready(layer);
        } else {
          ++cancelled;
          wrong += ticket->outcome().code != ErrorCode::kCancelled || !cancel;
          wrong += !stream->failed();
        }
        for (const uint32_t slot : slots) wrong += !pool_->release(slot);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_GT(finished.load(), 0);
  EXPECT_EQ(pool_->available(), pool_->num_slots());
  EXPECT_EQ(manager_->read_queue_tokens(), 0u);
}

// Spins, so that it looks in the very moment in which the ticket ends.
bool ends(const Ticket& ticket) {
  const int64_t deadline = in_seconds(20);
  while (!ticket.done() && now_ns() < deadline) {
  }
  return ticket.done();
}

TEST_P(TrafficStressTest, AccountsAreSettledWhenATicketEnds) {
  store_everything();
  const auto slots = acquire(*pool_, kLength);
  for (int round = 0; round < 300; ++round) {
    const auto stream = manager_->make_stream(kLength);
    const auto ticket =
        manager_->load({chains_[round % kChains], slots, 1, stream, in_seconds(20)});
    if (round % 2 == 0) ticket->cancel();
    ASSERT_TRUE(ends(*ticket));
    ASSERT_EQ(manager_->read_queue_tokens(), 0u) << "round " << round;
  }

  // A store with room for one chain: the next is refused if the last still counts as being written.
  StoreOptions capped;
  capped.max_bytes = kLength * store_->file_bytes();
  const auto store =
      std::make_shared<BlockStore>(directory_.path() + "/capped", root_, kLayout, capped);
  TrafficOptions options;
  options.io.backend = GetParam();
  TrafficManager manager(store, pool_, device_, kLayout, options);
  for (int round = 0; round < 100; ++round) {
    const auto ticket = manager.persist({chains_[round % kChains], slots});
    ASSERT_TRUE(ends(*ticket));
    ASSERT_EQ(ticket->blocks(), kLength) << "round " << round;
  }
  for (const uint32_t slot : slots) pool_->release(slot);
}

TEST_P(TrafficStressTest, LoadsUnderRandomDeadlinesEndInTimeAndLeakNothing) {
  store_everything();
  manager_->set_cap(TrafficKind::kStorageRead, 3'000'000);
  std::mt19937_64 random(3);
  int late = 0;
  for (int round = 0; round < 25; ++round) {
    const auto slots = acquire(*pool_, kLength);
    const auto& chain = chains_[random() % kChains];
    const int64_t deadline = now_ns() + static_cast<int64_t>(random() % 30'000'000);
    const auto stream = manager_->make_stream(kLength);
    const auto ticket = manager_->load({chain, slots, 4, stream, deadline});
    ASSERT_TRUE(ticket->wait(in_seconds(10)));
    if (!ticket->outcome().ok()) {
      ++late;
      EXPECT_EQ(ticket->outcome().code, ErrorCode::kTimeout);
      EXPECT_EQ(stream->failure().code, ErrorCode::kTimeout);
    }
    for (const uint32_t slot : slots) EXPECT_TRUE(pool_->release(slot));
  }
  EXPECT_GT(late, 0);
  EXPECT_EQ(pool_->available(), pool_->num_slots());
}

TEST_P(TrafficStressTest, BlocksDamagedAtRandomAreNeverReportedAsGood) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 15; ++round) {
    store_everything();
    for (const auto& chain : chains_) {
      const std::string path = store_->path_of(chain[random() % kLength]);
      const int fd = open(path.c_str(), O_RDWR);
      ASSERT_GE(fd, 0);
      const auto at = static_cast<off_t>(random() % (152 + 32));
      const auto place = random() % 2 ? at : static_cast<off_t>(4096 + random() % 8192);
      uint8_t byte;
      ASSERT_EQ(pread(fd, &byte, 1, place), 1);
      byte ^= static_cast<uint8_t>(1 << random() % 8);
      ASSERT_EQ(pwrite(fd, &byte, 1, place), 1);
      close(fd);
    }
    for (const auto& chain : chains_) {
      const auto slots = acquire(*pool_, kLength);
      const auto ticket = manager_->load({chain, slots, 1, nullptr, in_seconds(20)});
      ASSERT_TRUE(ticket->wait(in_seconds(20)));
      EXPECT_EQ(ticket->outcome().code, ErrorCode::kCorrupt);
      ASSERT_LT(ticket->blocks(), kLength);
      for (uint32_t i = 0; i < ticket->blocks(); ++i) {
        EXPECT_TRUE(holds_block(*pool_, slots[i], chain[i].key));
      }
      for (const uint32_t slot : slots) pool_->release(slot);
    }
  }
}

TEST_P(TrafficStressTest, StagesOfManySequencesAtOnceDoNotMixTheirBytes) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (uint64_t round = 0; round < 30; ++round) {
        std::vector<uint32_t> slots(3);
        if (!pool_->acquire(slots)) continue;
        for (uint32_t i = 0; i < 3; ++i)
          fill_block(*pool_, slots[i], make_key(id * 100 + round + i));
        MoveSpec spec;
        spec.cache = cache_;
        spec.pages = {id * 4, id * 4 + 2, id * 4 + 1};
        for (const uint32_t slot : slots) spec.block_starts.push_back(pool_->payload_offset(slot));
        spec.num_tokens = 40;
        spec.slots = slots;
        spec.into = manager_->make_stream(1);
        const auto ticket = manager_->stage(spec);
        wrong += !ticket->wait(in_seconds(10));
        for (uint32_t layer = 0; layer < 4; ++layer) {
          for (uint32_t t = 0; t < 40; ++t) {
            for (uint32_t plane = 0; plane < 2; ++plane) {
              const uint64_t from = spec.block_starts[t / 16] + kLayout.layer_offset(layer) +
                                    plane * 16 * 256 + t % 16 * 256;
              const uint64_t to = cache_->layer(layer).base + plane * 16 * 16 * 256 +
                                  static_cast<uint64_t>(spec.pages[t / 16]) * 16 * 256 +
                                  t % 16 * 256;
              wrong += std::memcmp(device_->data() + to, pool_->region()->data() + from, 256) != 0;
            }
          }
        }
        for (const uint32_t slot : slots) pool_->release(slot);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(pool_->available(), pool_->num_slots());
}

INSTANTIATE_TEST_SUITE_P(Twins, TrafficStressTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                         [](const auto& info) {
                           return info.param == IoBackend::kUring ? "uring" : "threads";
                         });

}  // namespace
}  // namespace kvtransfer
