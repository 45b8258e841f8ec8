// File systems that misbehave: that hang, that are read-only, that are out of descriptors.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "kvtransfer/block_store.h"
#include "store/mount.h"
#include "store/store_io.h"
#include "test_support.h"
#include "wrapped_queue.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary
namespace fs = std::filesystem;

const BlockLayout kLayout(2, 8, {256, 200});
constexpr int64_t kTimeout = 30'000'000;

// ------------------------------------------------------------------------------------------ Mount

TEST(Mount, AnswersComeFromAThreadOfItsOwn) {
  Mount mount("/somewhere", kTimeout);
  const auto caller = std::this_thread::get_id();
  const auto other = mount.ask<std::thread::id>([] { return std::this_thread::get_id(); });
  ASSERT_TRUE(other.has_value());
  EXPECT_NE(*other, caller);
  Mount plain("/somewhere", 0);
  EXPECT_EQ(plain.ask<std::thread::id>([] { return std::this_thread::get_id(); }), caller);
}

TEST(Mount, AQuestionThatHangsCostsOneDeadlineAndTheNextOnesNothing) {
  Mount mount("/somewhere", kTimeout);
  std::atomic<bool> release{false};
  const int64_t begin = now_ns();
  EXPECT_FALSE(mount.ask<int>([&] {
    while (!release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 1;
  }));
  EXPECT_GE(now_ns() - begin, kTimeout);
  EXPECT_TRUE(mount.slow());
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(mount.ask<int>([] { return 2; }));
  EXPECT_LT(now_ns() - begin, 100 * kTimeout) << "nobody waits for a mount that is known to hang";
  release = true;
  while (mount.slow()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(mount.ask<int>([] { return 3; }), 3);
}

TEST(Mount, MayBeDestroyedWhileAQuestionHangs) {
  const auto release = std::make_shared<std::atomic<bool>>(false);
  {
    Mount mount("/somewhere", kTimeout);
    EXPECT_FALSE(mount.ask<int>([release] {
      while (!*release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return 1;
    }));
  }
  *release = true;
}

TEST(Mount, EveryWayOfEndingLeavesTheAccountsEven) {
  Mount mount("/somewhere", 1'000'000);
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const auto pause = std::chrono::microseconds(random() % 2000);
    mount.ask<int>([pause] {
      std::this_thread::sleep_for(pause);
      return 0;
    });
  }
  const int64_t late = in_seconds(10);
  while (mount.slow() && now_ns() < late) std::this_thread::yield();
  EXPECT_FALSE(mount.slow());
}

// --------------------------------------------------------------------------------- a hanging file

// Holds back the operations that `hang` picks until release().
class HangingQueue final : public WrappedQueue {
 public:
  explicit HangingQueue(std::function<bool(const IoRequest&)> hang)
      : WrappedQueue({.backend = IoBackend::kThreads, .depth = 16}), hang_(std::move(hang)) {}
  bool prepare(const IoRequest& request) noexcept override {
    if (!hang_(request)) return inner_->prepare(request);
    held_.push_back(request);
    return true;
  }
  void release() {
    for (const IoRequest& request : held_) inner_->prepare(request);
    held_.clear();
    hang_ = [](const IoRequest&) { return false; };
  }
  void wait(std::span<const int> fds, int64_t deadline) noexcept override {
    inner_->wait(fds, std::min(deadline, now_ns() + 1'000'000));
  }
  uint32_t in_flight() const noexcept override {
    return inner_->in_flight() + static_cast<uint32_t>(held_.size());
  }

 private:
  std::function<bool(const IoRequest&)> hang_;
  std::vector<IoRequest> held_;
};

class HangTest : public ::testing::Test {
 protected:
  HangTest() {
    options_.operation_timeout_ms = 30;
    store_ = std::make_unique<BlockStore>(directory_.path() + "/s", root_, kLayout, options_);
    for (const uint32_t slot : slots_) {
      fill_random(pool_->region()->data() + pool_->payload_offset(slot), kLayout.full_block_bytes(),
                  slot);
    }
  }
  template <typename Job>
  void run_until(StoreIo& io, IoQueue& queue, Job& job, const std::function<bool()>& done) {
    const int64_t late = in_seconds(10);
    while (!done() && now_ns() < late) {
      while (io.issue(job)) {
      }
      if (io.poll() == 0) queue.wait({}, now_ns() + 1'000'000);
    }
    ASSERT_TRUE(done());
  }

  TemporaryDirectory directory_;
  const BlockKey root_ = make_key(1);
  StoreOptions options_;
  std::unique_ptr<BlockStore> store_;
  std::shared_ptr<BufferPool> pool_ = make_pool(kLayout, 8);
  std::vector<uint32_t> slots_ = acquire(*pool_, 4);
  std::vector<BlockId> chain_ = make_chain(root_, 4);
};

TEST_F(HangTest, AReadThatHangsIsAMissAndTheStoreIsUntilTheMountAnswers) {
  ASSERT_EQ(store_->put(chain_, *pool_, slots_), 4u);
  int reads = 0;
  HangingQueue queue([&](const IoRequest& r) { return r.op == IoOp::kRead && ++reads == 3; });
  StoreIo io(*store_, queue, *pool_);
  ReadJob job;
  job.chain = chain_;
  job.slots = slots_;
  job.cuts = {0, 2};
  job.on_landed = job.on_layers = [](uint32_t, uint32_t) {};
  io.begin(job);
  run_until(io, queue, job, [&] { return job.overdue; });
  EXPECT_EQ(job.failure.code, ErrorCode::kTimeout);
  EXPECT_LT(job.good_blocks, 4u);
  EXPECT_EQ(job.complete_blocks(), job.good_blocks) << "the others had time enough";
  EXPECT_FALSE(job.finished()) << "its slot may still be written";
  EXPECT_TRUE(store_->stats().mount_slow);
  EXPECT_EQ(store_->lookup(chain_), 0u);
  EXPECT_EQ(store_->admit(make_chain(root_, 1, 7)).blocks, 0u);
  queue.release();
  run_until(io, queue, job, [&] { return job.finished() && queue.in_flight() == 0; });
  EXPECT_FALSE(store_->stats().mount_slow);
  EXPECT_EQ(store_->lookup(chain_), 4u) << "nothing was lost";
}

TEST_F(HangTest, AWriteThatHangsAtAnyStepFailsItsJobAndLeavesNothingBehind) {
  for (int step = 0; step < 5; ++step) {
    const auto chain = make_chain(root_, 2, 10 + step);
    int count = 0;
    HangingQueue queue([&](const IoRequest&) { return count++ == step; });
    StoreIo io(*store_, queue, *pool_);
    WriteJob job;
    job.chain = chain;
    job.slots = {slots_[0], slots_[1]};
    io.begin(job);
    run_until(io, queue, job, [&] { return job.overdue; });
    EXPECT_EQ(job.failure.code, ErrorCode::kTimeout) << step;
    EXPECT_FALSE(job.finished());
    queue.release();
    run_until(io, queue, job, [&] { return job.finished() && queue.in_flight() == 0; });
    for (size_t i = 0; i < chain.size(); ++i) {
      EXPECT_TRUE(!job.stored[i] || fs::exists(store_->path_of(chain[i]))) << step;
    }
    for (const auto& entry : fs::recursive_directory_iterator(directory_.path())) {
      EXPECT_FALSE(entry.path().filename().string().starts_with(".tmp-")) << step;
    }
    EXPECT_FALSE(store_->stats().mount_slow);
  }
}

// tests/python/test_fuse.py does the same to a whole engine, with a FUSE daemon that is stopped.

// ------------------------------------------------------------------------- read-only, descriptors

// Runs `body` in a child process with a mount namespace of its own; its exit status, or -1.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS) != 0) _exit(77);
    mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(HangTest, AReadOnlyFileSystemServesReadsAndRefusesWrites) {
  ASSERT_EQ(store_->put(chain_, *pool_, slots_), 4u);
  store_.reset();
  const int status = in_child([&] {
    const char* at = directory_.path().c_str();
    if (mount(at, at, nullptr, MS_BIND, nullptr) != 0 ||
        mount(nullptr, at, nullptr, MS_BIND | MS_REMOUNT | MS_RDONLY, nullptr) != 0) {
      return 77;
    }
    StoreOptions capped;
    capped.max_bytes = 1 << 30;
    BlockStore store(directory_.path() + "/s", root_, kLayout, capped);
    if (store.lookup(chain_) != 4) return 1;
    if (store.get(chain_, *pool_, slots_) != 4) return 2;
    if (store.put(make_chain(root_, 2, 5), *pool_, std::span(slots_).first(2)) != 0) return 3;
    if (!store.stats().writes_stopped) return 4;
    if (store.get(chain_, *pool_, slots_) != 4) return 5;
    return store.evict() == 0 ? 0 : 6;
  });
  if (status == 77) GTEST_SKIP() << "no mount namespaces here";
  EXPECT_EQ(status, 0);
}

TEST_F(HangTest, WithoutDescriptorsBlocksAreMissesAndComeBack) {
  ASSERT_EQ(store_->put(chain_, *pool_, slots_), 4u);
  const auto queue = IoQueue::create({.depth = 8});
  StoreIo io(*store_, *queue, *pool_);
  EXPECT_EQ(io.read_now(chain_, slots_), 4u);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  EXPECT_EQ(io.read_now(chain_, slots_), 0u);
  EXPECT_EQ(io.write_now(make_chain(root_, 1, 5), std::span(slots_).first(1), 0), 0u);
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(io.read_now(chain_, slots_), 4u) << "the files were fine";
  EXPECT_EQ(store_->stats().corrupt, 0u);
}

}  // namespace
}  // namespace kvtransfer
