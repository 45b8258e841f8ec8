// Sharing one I/O queue: reads before writes, writes never starved, closes and removals in turn.
#include "store/store_io.h"

#include <deque>
#include <set>

#include "test_support.h"
#include "wrapped_queue.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

const BlockLayout kLayout(2, 8, {256, 200});

// Completes operations one by one and counts what was prepared.
class CountingQueue final : public WrappedQueue {
 public:
  explicit CountingQueue(uint32_t depth) : WrappedQueue({.depth = depth}) {}
  bool prepare(const IoRequest& request) noexcept override {
    if (!inner_->prepare(request)) return false;
    ++prepared[request.op];
    return true;
  }
  size_t poll(std::span<IoCompletion> out) noexcept override {
    return inner_->poll(out.first(std::min<size_t>(out.size(), 1)));
  }

  std::map<IoOp, int> prepared;
};

// Keeps what was read to itself until `count` reads are through, then hands them over together.
class GatheringQueue final : public WrappedQueue {
 public:
  explicit GatheringQueue(size_t count) : WrappedQueue({.depth = 32}), count_(count) {}
  bool prepare(const IoRequest& request) noexcept override {
    if (request.op == IoOp::kRead) reads_.insert(request.user_data);
    return inner_->prepare(request);
  }
  size_t poll(std::span<IoCompletion> out) noexcept override {
    const size_t found = inner_->poll(out);
    size_t others = 0;
    for (size_t i = 0; i < found; ++i) {
      if (reads_.erase(out[i].user_data) != 0) {
        gathered_.push_back(out[i]);
      } else {
        out[others++] = out[i];
      }
    }
    if (others > 0 || gathered_.size() < count_) return others;
    std::copy(gathered_.begin(), gathered_.end(), out.begin());
    return std::exchange(gathered_, {}).size();
  }
  uint32_t in_flight() const noexcept override {
    return inner_->in_flight() + static_cast<uint32_t>(gathered_.size());
  }

 private:
  const size_t count_;
  std::set<uint64_t> reads_;
  std::vector<IoCompletion> gathered_;
};

class StoreIoTest : public ::testing::Test {
 protected:
  ReadJob read_job(const std::vector<BlockId>& chain, const std::vector<uint32_t>& slots) {
    ReadJob job;
    job.chain = chain;
    job.slots = slots;
    job.cuts = {0, 2};
    job.on_landed = job.on_layers = [](uint32_t, uint32_t) {};
    return job;
  }
  TemporaryDirectory directory_;
  const BlockKey root_ = make_key(1);
  BlockStore store_{directory_.path() + "/s", root_, kLayout};
  std::shared_ptr<BufferPool> pool_ = make_pool(kLayout, 200);
};

TEST_F(StoreIoTest, AnyDepthReadsAndWritesEverything) {
  const auto slots = acquire(*pool_, 40);
  for (const uint32_t depth : {1u, 2u, 3u, 8u, 64u}) {
    CountingQueue queue(depth);
    StoreIo io(store_, queue, *pool_);
    const auto chain = make_chain(root_, 40, depth);
    EXPECT_EQ(io.write_now(chain, slots, 0), 40u) << depth;
    EXPECT_EQ(io.read_now(chain, slots), 40u) << depth;
    while (queue.in_flight() > 0) {
      io.poll();
      queue.wait({}, now_ns() + 1'000'000);
    }
    EXPECT_EQ(queue.prepared[IoOp::kClose], 80) << "every descriptor is closed, by the queue";
  }
}

TEST_F(StoreIoTest, WritesUseAnEighthOfTheQueueWhileReadsWaitAndAreNotStarved) {
  const auto slots = acquire(*pool_, 200);
  const auto chain = make_chain(root_, 100, 1);
  ASSERT_EQ(store_.put(chain, *pool_, std::span(slots).first(100)), 100u);
  CountingQueue queue(16);
  StoreIo io(store_, queue, *pool_);
  WriteJob write;
  write.chain = make_chain(root_, 100, 2);
  write.slots.assign(slots.begin() + 100, slots.end());
  io.begin(write);
  // Reads without end: whenever one is through, the next begins.
  std::deque<ReadJob> reads;
  uint32_t most_writes = 0;
  int rounds_of_reads = 0;
  const int64_t late = in_seconds(30);
  while (!write.finished() && now_ns() < late) {
    if (reads.empty() || reads.back().next_part >= reads.back().num_parts()) {
      reads.push_back(read_job(chain, {slots.begin(), slots.begin() + 100}));
      io.begin(reads.back());
      ++rounds_of_reads;
    }
    while (io.issue(reads.back())) {
    }
    while (io.issue(write)) {
    }
    if (rounds_of_reads > 1) most_writes = std::max(most_writes, write.in_flight);
    if (io.poll() == 0) queue.wait({}, now_ns() + 1'000'000);
    while (!reads.empty() && reads.front().finished()) {
      EXPECT_EQ(reads.front().good_blocks, 100u);
      reads.pop_front();
    }
  }
  EXPECT_TRUE(write.finished()) << "reads without end starved the writes";
  EXPECT_EQ(std::count(write.stored.begin(), write.stored.end(), true), 100);
  EXPECT_GT(rounds_of_reads, 2) << "writes starved the reads";
  EXPECT_LE(most_writes, 3u);
  while (!reads.empty()) {
    while (io.issue(reads.back())) {
    }
    if (io.poll() == 0) queue.wait({}, now_ns() + 1'000'000);
    while (!reads.empty() && reads.front().finished()) reads.pop_front();
  }
}

TEST_F(StoreIoTest, WhatHasLandedIsVerifiedAndAnnouncedLowestLayerFirst) {
  const BlockLayout layout(8, 16, {4096});  // 64 KiB a layer: several polls verify it all
  const auto pool = make_pool(layout, 12);
  BlockStore store(directory_.path() + "/layers", root_, layout);
  const auto slots = acquire(*pool, 12);
  const auto chain = make_chain(root_, 12);
  ASSERT_EQ(store.put(chain, *pool, slots), 12u);
  GatheringQueue queue(12);
  StoreIo io(store, queue, *pool);
  ReadJob job = read_job(chain, slots);
  job.cuts = {0, 8};
  std::vector<uint32_t> announced, wanted;
  job.on_layers = [&](uint32_t first, uint32_t end) {
    EXPECT_EQ(end, first + 1);
    announced.push_back(first);
  };
  io.begin(job);
  while (io.issue(job)) {
  }
  while (!job.finished()) {
    if (io.poll() == 0) queue.wait({}, now_ns() + 1'000'000);
  }
  for (uint32_t layer = 0; layer < 8; ++layer) wanted.insert(wanted.end(), 12, layer);
  EXPECT_EQ(announced, wanted);
  EXPECT_EQ(job.complete_blocks(), 12u);
}

TEST_F(StoreIoTest, LatenciesAreCountedPerBlock) {
  const auto slots = acquire(*pool_, 10);
  const auto chain = make_chain(root_, 10);
  EXPECT_EQ(store_.read_latency_ns(0.5), 0);
  ASSERT_EQ(store_.put(chain, *pool_, slots), 10u);
  ASSERT_EQ(store_.get(chain, *pool_, slots), 10u);
  EXPECT_GT(store_.read_latency_ns(0.5), 0);
  EXPECT_GE(store_.write_latency_ns(0.99), store_.write_latency_ns(0.5));
}

TEST_F(StoreIoTest, AnUnremovableFileDoesNotWedgeTheEviction) {
  StoreOptions options;
  options.max_bytes = 10 * store_.file_bytes();
  BlockStore store(directory_.path() + "/capped", root_, kLayout, options);
  const auto slots = acquire(*pool_, 4);
  // The two oldest leaves can't be removed: they are directories by now.
  for (const uint64_t branch : {1, 2}) {
    const auto chain = make_chain(root_, 1, branch);
    ASSERT_EQ(store.put(chain, *pool_, std::span(slots).first(1)), 1u);
  }
  std::vector<std::string> stuck;
  for (const uint64_t branch : {1, 2}) {
    stuck.push_back(store.path_of(make_chain(root_, 1, branch)[0]));
  }
  const std::string attribute = "chattr +i '" + stuck[0] + "' '" + stuck[1] + "' 2> /dev/null";
  if (system(attribute.c_str()) != 0) GTEST_SKIP() << "no immutable files here";
  for (uint64_t branch = 10; branch < 40; ++branch) {
    const auto chain = make_chain(root_, 2, branch);
    EXPECT_EQ(store.put(chain, *pool_, std::span(slots).first(2)), 2u) << branch;
  }
  const StoreStats stats = store.stats();
  ASSERT_EQ(system(("chattr -i '" + stuck[0] + "' '" + stuck[1] + "'").c_str()), 0);
  EXPECT_GT(stats.unremovable, 0u);
  EXPECT_GT(stats.evicted, 40u);
  EXPECT_LE(stats.bytes, options.max_bytes);
}

}  // namespace
}  // namespace kvtransfer
