// Random reads and writes on both IoQueue twins against a model in memory.
#include <errno.h>
#include <fcntl.h>

#include <cstring>
#include <map>

#include "base/fd.h"
#include "kvtransfer/io_queue.h"
#include "kvtransfer/memory_region.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

constexpr uint64_t kFileBytes = 64 * 4096;
constexpr uint32_t kSlots = 16;
constexpr uint64_t kSlotBytes = 8 * 4096;

class IoRandomTest : public ::testing::TestWithParam<std::tuple<IoBackend, uint32_t, bool>> {
 protected:
  struct Pending {
    bool write;
    uint64_t offset, length;
    std::vector<uint8_t> wanted;  // of a read, as the file stood when it was prepared
  };

  IoRandomTest() {
    const auto [backend, depth, direct] = GetParam();
    path_ = directory_.path() + "/file";
    fd_ = Fd(open(path_.c_str(), O_RDWR | O_CREAT | (direct ? O_DIRECT : 0), 0644));
    EXPECT_TRUE(fd_.valid());
    EXPECT_EQ(ftruncate(fd_.get(), kFileBytes), 0);
    const IoBuffer buffer{region_.data(), region_.bytes()};
    queue_ = IoQueue::create({.backend = backend, .depth = depth}, {&buffer, 1});
    for (uint32_t slot = 0; slot < kSlots; ++slot) free_.push_back(slot);
  }

  // True if it overlaps an operation in flight in a way that leaves the result open.
  bool conflicts(bool write, uint64_t offset, uint64_t length) const {
    return std::any_of(pending_.begin(), pending_.end(), [&](const auto& entry) {
      const Pending& p = entry.second;
      return (write || p.write) && offset < p.offset + p.length && p.offset < offset + length;
    });
  }

  void start(std::mt19937_64& random) {
    if (free_.empty()) return;
    const bool write = random() % 2 == 0;
    const uint64_t length = 4096 * (1 + random() % 8);
    const uint64_t offset = 4096 * (random() % ((kFileBytes - length) / 4096 + 1));
    if (conflicts(write, offset, length)) return;
    const uint32_t slot = free_.back();
    uint8_t* buffer = region_.data() + slot * kSlotBytes;
    if (write) testing::fill_random(buffer, length, random());
    IoRequest request;
    request.op = write ? IoOp::kWrite : IoOp::kRead;
    request.fd = fd_.get();
    request.buffer = buffer;
    request.offset = offset;
    request.length = length;
    request.user_data = slot;
    if (!queue_->prepare(request)) {
      EXPECT_EQ(queue_->in_flight(), queue_->depth());
      return;
    }
    free_.pop_back();
    Pending pending{write, offset, length, {}};
    if (write) {
      std::memcpy(model_.data() + offset, buffer, length);
    } else {
      pending.wanted.assign(model_.begin() + static_cast<long>(offset),
                            model_.begin() + static_cast<long>(offset + length));
    }
    pending_.emplace(slot, std::move(pending));
  }

  void collect() {
    IoCompletion out[5];
    const size_t count = queue_->poll(out);
    for (size_t i = 0; i < count; ++i) {
      const auto it = pending_.find(static_cast<uint32_t>(out[i].user_data));
      ASSERT_NE(it, pending_.end()) << "a completion nobody waits for";
      const Pending& p = it->second;
      ASSERT_EQ(out[i].result, static_cast<int64_t>(p.length));
      if (!p.write) {
        ASSERT_EQ(std::memcmp(region_.data() + it->first * kSlotBytes, p.wanted.data(), p.length),
                  0);
      }
      free_.push_back(it->first);
      pending_.erase(it);
    }
  }

  testing::TemporaryDirectory directory_;
  std::string path_;
  Fd fd_;
  MemoryRegion region_{kSlots * kSlotBytes, RegionKind::kAnonymous, HugePages::kOff};
  std::vector<uint8_t> model_ = std::vector<uint8_t>(kFileBytes);
  std::unique_ptr<IoQueue> queue_;
  std::vector<uint32_t> free_;
  std::map<uint32_t, Pending> pending_;
};

TEST_P(IoRandomTest, EveryReadSeesEveryWriteBeforeIt) {
  std::mt19937_64 random(std::get<1>(GetParam()));
  for (int step = 0; step < 1500; ++step) {
    start(random);
    if (random() % 3 == 0) queue_->submit();
    if (random() % 2 == 0) collect();
    if (HasFatalFailure()) return;
  }
  queue_->submit();
  const int64_t deadline = testing::in_seconds(20);
  while (!pending_.empty() && now_ns() < deadline) {
    queue_->wait({}, testing::in_seconds(0.05));
    collect();
  }
  EXPECT_TRUE(pending_.empty());
  EXPECT_EQ(queue_->in_flight(), 0u);
  std::vector<uint8_t> file(kFileBytes);
  const Fd plain(open(path_.c_str(), O_RDONLY));
  ASSERT_EQ(pread(plain.get(), file.data(), file.size(), 0), static_cast<ssize_t>(file.size()));
  EXPECT_EQ(file, model_);
}

INSTANTIATE_TEST_SUITE_P(
    Twins, IoRandomTest,
    ::testing::Combine(::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                       ::testing::Values(1u, 3u, 64u), ::testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == IoBackend::kUring ? "uring" : "threads") +
             std::to_string(std::get<1>(info.param)) +
             (std::get<2>(info.param) ? "direct" : "buffered");
    });

}  // namespace
}  // namespace kvtransfer
