#include "kvtransfer/block_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utime.h>

#include <fstream>
#include <thread>

#include "base/fd.h"
#include "faulty_queue.h"
#include "store/catalog.h"
#include "store/store_io.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

class BlockStoreTest : public ::testing::Test {
 protected:
  BlockStore open(const StoreOptions& options = {}) {
    return BlockStore(directory_.path() + "/store", root_, layout_, options);
  }
  // Puts `count` random blocks of `branch` and returns their chain.
  std::vector<BlockId> put(BlockStore& store, uint32_t count, uint64_t branch = 0) {
    const auto chain = make_chain(root_, count, branch);
    const auto slots = acquire(*pool_, count);
    for (uint32_t i = 0; i < count; ++i) fill(slots[i], branch * 100 + i);
    EXPECT_EQ(store.put(chain, *pool_, slots), count);
    for (const uint32_t slot : slots) pool_->release(slot);
    return chain;
  }
  void fill(uint32_t slot, uint64_t seed) {
    fill_random(pool_->region()->data() + pool_->payload_offset(slot), layout_.full_block_bytes(),
                seed);
  }
  // Length of the good prefix; checks every byte of it.
  uint32_t read(BlockStore& store, const std::vector<BlockId>& chain, uint64_t branch = 0) {
    const auto slots = acquire(*pool_, static_cast<uint32_t>(chain.size()));
    const uint32_t good = store.get(chain, *pool_, slots);
    for (uint32_t i = 0; i < good; ++i) {
      std::vector<uint8_t> wanted(layout_.full_block_bytes());
      fill_random(wanted.data(), wanted.size(), branch * 100 + i);
      EXPECT_EQ(payload_of(*pool_, slots[i], layout_), wanted) << "block " << i;
    }
    for (const uint32_t slot : slots) pool_->release(slot);
    return good;
  }
  std::vector<std::string> files() {
    std::vector<std::string> found;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(directory_.path() + "/store")) {
      if (entry.is_regular_file() && entry.path().extension() == ".kvb") {
        found.push_back(entry.path());
      }
    }
    return found;
  }

  BlockKey root_ = make_key(42);
  BlockLayout layout_{3, 16, {100, 60}};  // 7,680 bytes: padded to 8,192 in the file
  TemporaryDirectory directory_;
  std::shared_ptr<BufferPool> pool_ = make_pool(layout_, 64);
};

TEST_F(BlockStoreTest, WhatWasPutIsFoundAndReadBackByteForByte) {
  BlockStore store = open();
  const auto chain = put(store, 10);
  EXPECT_EQ(store.lookup(chain), 10u);
  EXPECT_EQ(read(store, chain), 10u);
  EXPECT_EQ(store.stats().published, 10u);
  EXPECT_EQ(store.stats().bytes, 10 * store.file_bytes());
}

TEST_F(BlockStoreTest, LookupStopsAtTheFirstMissingBlock) {
  BlockStore store = open();
  auto chain = put(store, 6);
  std::filesystem::remove(store.path_of(chain[4]));
  BlockStore again = open();
  EXPECT_EQ(again.lookup(chain), 4u);
  EXPECT_EQ(again.lookup(make_chain(root_, 3, 9)), 0u);
}

TEST_F(BlockStoreTest, AnotherProcessesBlocksAreFoundWithoutARestart) {
  BlockStore reader = open();
  const auto chain = make_chain(root_, 4);
  EXPECT_EQ(reader.lookup(chain), 0u);
  const pid_t child = fork();
  if (child == 0) {
    BlockStore writer = open();
    put(writer, 4);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status;
  waitpid(child, &status, 0);
  ASSERT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(reader.lookup(chain), 4u);
  EXPECT_EQ(read(reader, chain), 4u);
}

TEST_F(BlockStoreTest, TheFirstPublishedBlockOfAKeyWins) {
  BlockStore store = open();
  const auto chain = put(store, 1);
  const auto slots = acquire(*pool_, 1);
  fill(slots[0], 777);
  EXPECT_EQ(store.put(chain, *pool_, slots), 1u);
  EXPECT_EQ(store.stats().duplicates, 1u);
  EXPECT_EQ(read(store, chain), 1u);  // still the first bytes
}

TEST_F(BlockStoreTest, TwoWritersRacingOnOneKeyLeaveOneWholeBlock) {
  BlockStore a = open(), b = open();
  const auto chain = make_chain(root_, 20);
  const auto put_all = [&](BlockStore& store) {
    const auto slots = acquire(*pool_, 20);
    for (uint32_t i = 0; i < 20; ++i) fill(slots[i], i);
    EXPECT_EQ(store.put(chain, *pool_, slots), 20u);
    for (const uint32_t slot : slots) pool_->release(slot);
  };
  std::thread other([&] { put_all(a); });
  put_all(b);
  other.join();
  EXPECT_EQ(files().size(), 20u);
  EXPECT_EQ(read(a, chain), 20u);
}

// Any flipped bit in header, checksums or payload makes the block a miss; never wrong bytes.
TEST_F(BlockStoreTest, AFlippedBitAnywhereThatMattersIsAMissAndTheGoodPrefixIsKept) {
  const uint64_t header_used = sizeof(BlockHeader) + layout_.num_layers() * 8;
  const uint64_t payload_begin = header_pages_bytes(layout_.num_layers());
  std::vector<uint64_t> offsets;
  for (uint64_t i = 0; i < header_used; ++i) offsets.push_back(i);
  offsets.push_back(4095);
  for (uint64_t i = 0; i < 40; ++i) offsets.push_back(payload_begin + i * 191);
  offsets.push_back(payload_begin + layout_.full_block_bytes() - 1);
  for (const uint64_t offset : offsets) {
    BlockStore store = open();
    const auto chain = put(store, 3);
    const std::string path = store.path_of(chain[1]);
    {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(static_cast<std::streamoff>(offset));
      const char byte = static_cast<char>(file.get() ^ (1 << offset % 8));
      file.seekp(static_cast<std::streamoff>(offset));
      file.put(byte);
    }
    ASSERT_EQ(read(store, chain), 1u) << "flip at " << offset;
    EXPECT_EQ(store.stats().corrupt, 1u);
    EXPECT_FALSE(std::filesystem::exists(path)) << "a corrupt file must make room";
    EXPECT_EQ(store.lookup(chain), 1u) << "the verdict must not be cached";
    put(store, 3);
    ASSERT_EQ(read(store, chain), 3u) << "the recomputed block takes its place";
  }
}

TEST_F(BlockStoreTest, TruncatedExtendedSwappedAndForeignFilesAreMisses) {
  BlockStore store = open();
  auto chain = put(store, 3);
  const std::string path = store.path_of(chain[1]);
  for (const uint64_t size : {uint64_t{0}, uint64_t{100}, uint64_t{4096}, store.file_bytes() - 1}) {
    put(store, 3);
    std::filesystem::resize_file(path, size);
    EXPECT_EQ(read(store, chain), 1u) << "truncated to " << size;
  }
  put(store, 3);
  std::filesystem::copy_file(store.path_of(chain[2]), path,
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(read(store, chain), 1u) << "another block's file under this name";
  put(store, 3);
  std::ofstream(path, std::ios::binary) << std::string(store.file_bytes(), 'x');
  EXPECT_EQ(read(store, chain), 1u) << "garbage of the right size";
}

TEST_F(BlockStoreTest, ABlockThatVanishesBetweenLookupAndReadIsAMiss) {
  BlockStore store = open();
  const auto chain = put(store, 5);
  ASSERT_EQ(store.lookup(chain), 5u);
  std::filesystem::remove(store.path_of(chain[3]));
  EXPECT_EQ(read(store, chain), 3u);
  EXPECT_EQ(store.lookup(chain), 3u);
}

TEST_F(BlockStoreTest, AStoreOfAnotherNamespaceOrLayoutIsRefusedByName) {
  { BlockStore store = open(); }
  const std::string path = directory_.path() + "/store";
  EXPECT_THROW(BlockStore(path, make_key(43), layout_), Error);
  try {
    BlockStore(path, root_, BlockLayout(3, 32, {100, 60}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    EXPECT_NE(std::string(error.what()).find("block_tokens 32"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("block_tokens 16"), std::string::npos);
  }
  std::ofstream(path + "/KVTRANSFER") << "kvtransfer block store, format 99\n";
  EXPECT_THROW(open(), Error);
}

TEST_F(BlockStoreTest, ARootThatIsNoDirectoryIsAnError) {
  std::ofstream(directory_.path() + "/file") << "x";
  EXPECT_THROW(BlockStore(directory_.path() + "/file", root_, layout_), Error);
  EXPECT_THROW(BlockStore("/proc/nonexistent/store", root_, layout_), Error);
}

TEST_F(BlockStoreTest, StaleTemporariesAreSweptAndFreshOnesLeftAlone) {
  { BlockStore store = open(); }
  const std::string old_one = directory_.path() + "/store/.tmp-1-2-3";
  const std::string new_one = directory_.path() + "/store/.tmp-1-2-4";
  std::ofstream(old_one) << "x";
  std::ofstream(new_one) << "x";
  const utimbuf times{1, 1};
  utime(old_one.c_str(), &times);
  BlockStore store = open();
  EXPECT_FALSE(std::filesystem::exists(old_one));
  EXPECT_TRUE(std::filesystem::exists(new_one));
  EXPECT_EQ(store.stats().swept_temporaries, 1u);
}

TEST_F(BlockStoreTest, TheByteCapHoldsAndTheLeastRecentlyUsedLeavesGoFirst) {
  StoreOptions options;
  options.max_bytes = 20 * BufferPool::slot_bytes(4096, layout_.full_block_bytes());
  BlockStore store = open(options);
  const auto first = put(store, 8, 1);
  const auto second = put(store, 8, 2);
  EXPECT_EQ(store.lookup(first), 8u);  // now more recent than the second
  const auto third = put(store, 8, 3);
  EXPECT_LE(store.stats().bytes, options.max_bytes);
  EXPECT_EQ(store.lookup(third), 8u);
  EXPECT_EQ(store.lookup(first), 8u);
  const uint32_t left = store.lookup(second);
  EXPECT_LT(left, 8u);
  EXPECT_EQ(read(store, second, 2), left) << "a prefix survives, never a hole";
  EXPECT_EQ(files().size(), store.stats().blocks);
}

TEST_F(BlockStoreTest, AdmissionCountsWhatIsBeingWritten) {
  StoreOptions options;
  options.max_bytes = 3 * BufferPool::slot_bytes(4096, layout_.full_block_bytes());
  BlockStore store = open(options);
  const auto chain = make_chain(root_, 5);
  const Admission first = store.admit(std::span(chain).first(3));
  EXPECT_EQ(first.blocks, 3u);
  EXPECT_EQ(first.reserved, 3u);
  EXPECT_EQ(store.admit(chain).blocks, 0u) << "three are on their way already";
  store.end_writes(3);
  EXPECT_EQ(store.admit(chain).blocks, 3u) << "as many as the cap allows";
  store.end_writes(3);
}

TEST_F(BlockStoreTest, PinnedBlocksStay) {
  StoreOptions options;
  options.max_bytes = 10 * BufferPool::slot_bytes(4096, layout_.full_block_bytes());
  BlockStore store = open(options);
  const auto pinned = put(store, 6, 1);
  store.pin(pinned);
  put(store, 4, 2);
  put(store, 4, 3);
  EXPECT_EQ(store.lookup(pinned), 6u);
  store.unpin(pinned);
}

TEST_F(BlockStoreTest, AFullDiskStopsWritesAndKeepsReads) {
  BlockStore store = open();
  const auto chain = put(store, 3);
  bool full = true;
  FaultyQueue queue([&](const IoRequest& r) { return full && r.op == IoOp::kWrite ? -ENOSPC : 0; });
  StoreIo io(store, queue, *pool_);
  const auto more = make_chain(root_, 5, 7);
  const auto slots = acquire(*pool_, 5);
  for (uint32_t i = 0; i < 5; ++i) fill(slots[i], 700 + i);
  EXPECT_EQ(io.write_now(more, slots, 0), 0u);
  EXPECT_TRUE(store.stats().writes_stopped);
  EXPECT_EQ(store.lookup(more), 0u);
  EXPECT_EQ(read(store, chain), 3u);
  EXPECT_EQ(files().size(), 3u);
  full = false;
  EXPECT_EQ(io.write_now(more, slots, 0), 5u);
  EXPECT_FALSE(store.stats().writes_stopped);
  EXPECT_EQ(read(store, more, 7), 5u);
}

TEST_F(BlockStoreTest, AFreeSpaceFloorThatCanNotBeMetRefusesWrites) {
  StoreOptions options;
  options.free_space_floor = uint64_t{1} << 60;
  BlockStore store = open(options);
  const auto slots = acquire(*pool_, 1);
  EXPECT_EQ(store.put(make_chain(root_, 1), *pool_, slots), 0u);
  EXPECT_TRUE(store.stats().writes_stopped);
  EXPECT_TRUE(files().empty());
}

// Every operation of a put fails in turn: nothing half-written ever becomes visible.
TEST_F(BlockStoreTest, AFailureAtAnyStepOfAWriteLeavesNothingVisible) {
  for (const Durability durability : {Durability::kNone, Durability::kFsync}) {
    for (int step = 0; step < 6; ++step) {
      StoreOptions options;
      options.durability = durability;
      BlockStore store = open(options);
      int count = 0;
      bool renamed = false;
      FaultyQueue queue([&](const IoRequest& r) {
        if (count++ == step) return -EIO;
        renamed |= r.op == IoOp::kRename;
        return 0;
      });
      StoreIo io(store, queue, *pool_);
      const auto chain = make_chain(root_, 1, 50 + step);
      const auto slots = acquire(*pool_, 1);
      fill(slots[0], (50 + step) * 100);
      const uint32_t stored = io.write_now(chain, slots, 0);
      pool_->release(slots[0]);
      EXPECT_EQ(stored, count <= step ? 1u : 0u) << "step " << step;
      BlockStore again = open(options);
      const uint32_t visible = again.lookup(chain);
      EXPECT_EQ(read(again, chain, 50 + step), visible) << "step " << step;
      EXPECT_EQ(visible, renamed ? 1u : 0u) << "step " << step;
    }
    std::filesystem::remove_all(directory_.path() + "/store");
  }
}

TEST_F(BlockStoreTest, ReadErrorsAreMissesWithAReasonThatNamesTheBlock) {
  BlockStore store = open();
  const auto chain = put(store, 4);
  int reads = 0;
  FaultyQueue queue(
      [&](const IoRequest& r) { return r.op == IoOp::kRead && ++reads == 3 ? -EIO : 0; });
  StoreIo io(store, queue, *pool_);
  ReadJob job;
  job.chain = chain;
  job.slots = acquire(*pool_, 4);
  job.cuts = layout_.cut_layers(1, 4096);
  job.on_landed = job.on_layers = [](uint32_t, uint32_t) {};
  io.begin(job);
  while (!job.finished()) {
    while (io.issue(job)) {
    }
    queue.submit();
    io.poll();
  }
  EXPECT_EQ(job.failure.code, ErrorCode::kIo);
  EXPECT_EQ(job.failure.sys_errno, EIO);
  EXPECT_LT(job.good_blocks, 4u);
  EXPECT_NE(job.failure.text.find("of 4"), std::string::npos) << job.failure.text;
  EXPECT_NE(job.failure.text.find(".kvb"), std::string::npos);
}

TEST_F(BlockStoreTest, ReadingInPartsAnnouncesLayersFrontFirstAndKeepsTheBytes) {
  const BlockLayout layout(8, 16, {256});  // 4 KiB a layer
  const auto pool = make_pool(layout, 8);
  BlockStore store(directory_.path() + "/parts", root_, layout);
  const auto chain = make_chain(root_, 3);
  auto slots = acquire(*pool, 3);
  for (uint32_t i = 0; i < 3; ++i) {
    fill_random(pool->region()->data() + pool->payload_offset(slots[i]), layout.full_block_bytes(),
                i);
  }
  ASSERT_EQ(store.put(chain, *pool, slots), 3u);
  const auto into = acquire(*pool, 3);
  const auto queue = IoQueue::create({.depth = 2});
  StoreIo io(store, *queue, *pool);
  ReadJob job;
  job.chain = chain;
  job.slots = into;
  job.cuts = layout.cut_layers(4, 4096);
  std::vector<uint32_t> arrivals(8);
  job.on_landed = [](uint32_t, uint32_t) {};
  job.on_layers = [&](uint32_t first, uint32_t end) {
    for (uint32_t l = first; l < end; ++l) ++arrivals[l];
    for (uint32_t l = 0; l < first; ++l) EXPECT_GE(arrivals[l] + 2, arrivals[first]);
  };
  io.begin(job);
  while (!job.finished()) {
    while (io.issue(job)) {
    }
    queue->submit();
    io.poll();
  }
  EXPECT_EQ(job.good_blocks, 3u);
  EXPECT_EQ(arrivals, std::vector<uint32_t>(8, 3));
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(payload_of(*pool, into[i], layout), payload_of(*pool, slots[i], layout));
  }
}

TEST_F(BlockStoreTest, NoDescriptorStaysOpenAfterFailures) {
  BlockStore store = open();
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto chain = put(store, 8);
  const auto before = count();
  for (int round = 0; round < 5; ++round) {
    put(store, 8);
    std::filesystem::resize_file(store.path_of(chain[round]), 4096);
    read(store, chain);
  }
  EXPECT_EQ(count(), before);
}

TEST_F(BlockStoreTest, APoolWhoseSlotsDoNotFitIsRefused) {
  BlockStore store = open();
  const auto small = make_pool(BlockLayout(1, 16, {16}), 4);
  EXPECT_THROW(store.get(make_chain(root_, 1), *small, std::vector<uint32_t>{0}), Error);
}

TEST(Catalog, EvictionPlansNeverLeaveAHoleInAnyChain) {
  std::mt19937 random(5);
  for (int round = 0; round < 50; ++round) {
    const BlockKey root = make_key(1);
    Catalog catalog(root);
    std::vector<BlockId> all;
    for (int i = 0; i < 60; ++i) {  // a random trie
      const BlockKey parent =
          all.empty() || random() % 4 == 0 ? root : all[random() % all.size()].key;
      all.push_back({make_key(round * 1000 + i), parent});
      catalog.insert(all.back());
    }
    const uint64_t keep = random() % 60;
    const auto plan = catalog.plan_eviction(keep);
    EXPECT_EQ(plan.size(), 60 - keep);
    for (const BlockId& id : plan) {
      for (const BlockId& other : all) {
        if (other.parent == id.key) {
          EXPECT_FALSE(catalog.contains(other.key)) << "evicted above a child";
        }
      }
      ASSERT_TRUE(catalog.erase(id.key));
    }
  }
}

TEST(Catalog, OrphansGoFirst) {
  const BlockKey root = make_key(1);
  Catalog catalog(root);
  catalog.insert({make_key(2), root});
  catalog.insert({make_key(3), make_key(99)});  // nobody knows its parent
  const auto plan = catalog.plan_eviction(1);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].key, make_key(3));
}

}  // namespace
}  // namespace kvtransfer
