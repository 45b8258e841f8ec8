// Writers that are killed, and many processes on one directory: what is visible is right.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <thread>

#include "kvtransfer/block_store.h"
#include "store/store_io.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

const BlockLayout kLayout(4, 16, {256, 256});

void fill_block(BufferPool& pool, uint32_t slot, const BlockKey& key) {
  uint64_t seed;
  memcpy(&seed, key.data(), sizeof seed);
  fill_random(pool.region()->data() + pool.payload_offset(slot), kLayout.full_block_bytes(), seed);
}

// Reads every chain and compares every byte with what its key stands for.
uint32_t verify_all(BlockStore& store, const std::vector<std::vector<BlockId>>& chains) {
  const auto pool = make_pool(kLayout, 32);
  uint32_t total = 0;
  for (const auto& chain : chains) {
    const auto slots = acquire(*pool, static_cast<uint32_t>(chain.size()) + 1);
    const uint32_t good = store.get(chain, *pool, std::span(slots).first(chain.size()));
    for (uint32_t i = 0; i < good; ++i) {
      fill_block(*pool, slots.back(), chain[i].key);
      EXPECT_EQ(payload_of(*pool, slots[i], kLayout), payload_of(*pool, slots.back(), kLayout));
    }
    for (const uint32_t slot : slots) pool->release(slot);
    total += good;
  }
  return total;
}

void write_forever(const std::string& path, const BlockKey& root, uint64_t first_branch,
                   const StoreOptions& options) {
  BlockStore store(path, root, kLayout, options);
  const auto pool = make_pool(kLayout, 8);
  for (uint64_t branch = first_branch;; ++branch) {
    const auto chain = make_chain(root, 8, branch);
    const auto slots = acquire(*pool, 8);
    for (uint32_t i = 0; i < 8; ++i) fill_block(*pool, slots[i], chain[i].key);
    store.put(chain, *pool, slots);
    for (const uint32_t slot : slots) pool->release(slot);
  }
}

class StoreCrashTest : public ::testing::TestWithParam<Durability> {};

TEST_P(StoreCrashTest, AWriterKilledAtAnyMomentLeavesOnlyWholeBlocks) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/store";
  const BlockKey root = make_key(1);
  StoreOptions options;
  options.durability = GetParam();
  options.stale_temporary_seconds = 0;
  { const BlockStore create(path, root, kLayout, options); }
  std::mt19937 random(7);
  for (uint64_t round = 0; round < 12; ++round) {
    const pid_t child = fork();
    if (child == 0) write_forever(path, root, round * 1000, options);
    usleep(3000 + random() % 30'000);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    BlockStore store(path, root, kLayout, options);
    std::vector<std::vector<BlockId>> chains;
    for (uint64_t branch = round * 1000; branch < round * 1000 + 300; ++branch) {
      chains.push_back(make_chain(root, 8, branch));
    }
    uint32_t found = 0;
    for (const auto& chain : chains) found += store.lookup(chain);
    EXPECT_EQ(verify_all(store, chains), found) << "a visible block that doesn't verify";
    EXPECT_EQ(store.stats().corrupt, 0u);
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    EXPECT_NE(entry.path().filename().string().rfind(".tmp-", 0), 0u) << "a temporary survived";
  }
}

INSTANTIATE_TEST_SUITE_P(Durabilities, StoreCrashTest,
                         ::testing::Values(Durability::kNone, Durability::kFsync),
                         [](const auto& info) {
                           return info.param == Durability::kNone ? "none" : "fsync";
                         });

TEST(StoreShared, ThreeProcessesUnderACapKeepItAndNeverServeAWrongByte) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/store";
  const BlockKey root = make_key(2);
  StoreOptions options;
  options.max_bytes = 60 * BufferPool::slot_bytes(4096, kLayout.full_block_bytes());
  { const BlockStore create(path, root, kLayout, options); }
  std::vector<pid_t> children;
  for (uint64_t writer = 0; writer < 3; ++writer) {
    const pid_t child = fork();
    if (child == 0) write_forever(path, root, writer * 100'000, options);
    children.push_back(child);
  }
  BlockStore reader(path, root, kLayout, options);
  const int64_t deadline = in_seconds(1.5);
  uint64_t verified = 0;
  for (uint64_t round = 0; now_ns() < deadline; ++round) {
    std::vector<std::vector<BlockId>> chains;
    for (uint64_t writer = 0; writer < 3; ++writer) {
      chains.push_back(make_chain(root, 8, writer * 100'000 + round % 50));
    }
    verified += verify_all(reader, chains);
  }
  for (const pid_t child : children) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  EXPECT_EQ(reader.stats().corrupt, 0u) << "eviction under a reader is a miss, not corruption";
  BlockStore after(path, root, kLayout, options);
  after.evict();
  EXPECT_LE(after.stats().bytes, options.max_bytes);
  uint64_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    files += entry.path().extension() == ".kvb" ? 1 : 0;
  }
  EXPECT_EQ(files, after.stats().blocks) << "accounting equals a rescan";
}

TEST(StoreShared, ReadersEvictorAndWriterThreadsOfOneProcessAgree) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "get() and put() make a ring each: their addresses and the descriptors that the "
                  "kernel opens are reused behind ThreadSanitizer's back";
#endif
  const TemporaryDirectory directory;
  const BlockKey root = make_key(3);
  StoreOptions options;
  options.max_bytes = 40 * BufferPool::slot_bytes(4096, kLayout.full_block_bytes());
  BlockStore store(directory.path() + "/store", root, kLayout, options);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    const auto pool = make_pool(kLayout, 8);
    for (uint64_t branch = 0; branch < 40; ++branch) {
      const auto chain = make_chain(root, 8, branch % 10);
      const auto slots = acquire(*pool, 8);
      for (uint32_t i = 0; i < 8; ++i) fill_block(*pool, slots[i], chain[i].key);
      store.put(chain, *pool, slots);
      for (const uint32_t slot : slots) pool->release(slot);
    }
    stop = true;
  });
  threads.emplace_back([&] {
    while (!stop) store.evict();
  });
  for (int reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&, reader] {
      for (uint64_t i = reader; !stop; ++i) verify_all(store, {make_chain(root, 8, i % 10)});
    });
  }
  for (auto& thread : threads) thread.join();
  store.rescan();
  EXPECT_LE(store.stats().bytes, options.max_bytes);
  EXPECT_EQ(store.stats().corrupt, 0u);
}

// The catalog against a simple model: a map of chains, random puts, removals and lookups.
TEST(StoreModel, RandomOperationsAgreeWithASimpleModel) {
  const TemporaryDirectory directory;
  const BlockKey root = make_key(4);
  BlockStore store(directory.path() + "/store", root, kLayout);
  const auto pool = make_pool(kLayout, 8);
  std::map<uint64_t, std::vector<bool>> present;
  std::mt19937_64 random(11);
  for (int step = 0; step < 300; ++step) {
    const uint64_t branch = random() % 6;
    const auto chain = make_chain(root, 8, branch);
    auto& model = present[branch];
    model.resize(8);
    const auto prefix = std::find(model.begin(), model.end(), false) - model.begin();
    switch (random() % 4) {
      case 0: {
        const uint32_t count = 1 + random() % 8;
        const auto slots = acquire(*pool, count);
        for (uint32_t i = 0; i < count; ++i) fill_block(*pool, slots[i], chain[i].key);
        EXPECT_EQ(store.put(std::span(chain).first(count), *pool, slots), count);
        for (const uint32_t slot : slots) pool->release(slot);
        std::fill_n(model.begin(), count, true);
        break;
      }
      case 1: {
        const uint32_t victim = random() % 8;
        std::filesystem::remove(store.path_of(chain[victim]));
        store.forget(chain[victim].key);
        model[victim] = false;
        break;
      }
      case 2:
        ASSERT_EQ(store.lookup(chain), prefix) << "step " << step;
        break;
      default:
        ASSERT_EQ(verify_all(store, {chain}), prefix) << "step " << step;
        for (size_t i = prefix; i < 8; ++i) {
          if (model[i]) {
            EXPECT_TRUE(store.contains(chain[i]));
          }
        }
    }
  }
}

}  // namespace
}  // namespace kvtransfer
