// The crash matrix: a writer dies before, in the middle of and after every single operation, with
// and without a loss of power. Whatever is found afterwards is right, what was reported is there.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <deque>
#include <fstream>
#include <map>
#include <set>

#include "store/store_io.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary
namespace fs = std::filesystem;

const BlockLayout kLayout(2, 8, {256, 200});

// Runs operations one by one, in order, until it dies: from then on nothing happens and nothing
// completes. Keeps account of what a loss of power would leave.
class MortalQueue final : public IoQueue {
 public:
  // Dies at operation `death` (from 0): before it, or after `torn` of its bytes, or after it.
  enum class Death { kBefore, kTorn, kAfter };
  MortalQueue(int death, Death how) : death_(death), how_(how) {}

  bool prepare(const IoRequest& request) noexcept override {
    pending_.push_back(request);
    return true;
  }
  void submit() noexcept override {}
  size_t poll(std::span<IoCompletion> out) noexcept override {
    if (dead() || pending_.empty()) return 0;
    const IoRequest request = pending_.front();
    pending_.pop_front();
    const bool last = count_++ == death_;
    if (last && how_ != Death::kAfter) {
      if (how_ == Death::kTorn && request.op == IoOp::kWrite) {
        [[maybe_unused]] const auto n = pwrite(request.fd, request.buffer, request.length / 2, 0);
      }
      dead_ = true;
      return 0;
    }
    const int64_t result = run(request);
    if (last) {
      dead_ = true;
      return 0;
    }
    out[0] = {request.user_data, result};
    return 1;
  }
  void wait(std::span<const int>, int64_t) noexcept override {}
  uint32_t in_flight() const noexcept override { return static_cast<uint32_t>(pending_.size()); }
  uint32_t depth() const noexcept override { return 16; }
  std::string_view backend() const noexcept override { return "mortal"; }
  bool buffers_registered() const noexcept override { return false; }

  bool dead() const { return dead_; }
  int count() const { return count_; }

  // What the power takes away that was never synced: file contents, and names in directories.
  enum class Loss { kNothing, kContents, kNames, kZeroes };
  void lose_power(Loss loss) const {
    if (loss == Loss::kNothing) return;
    for (const std::string& file : files_) {
      if (synced_files_.contains(inode_of(file)) || !fs::exists(file)) continue;
      if (loss == Loss::kContents) fs::resize_file(file, 0);
      if (loss == Loss::kZeroes) {
        const auto size = fs::file_size(file);
        std::ofstream(file, std::ios::binary) << std::string(size, '\0');
      }
    }
    if (loss != Loss::kNames) return;
    for (auto it = names_.rbegin(); it != names_.rend(); ++it) {  // newest first
      if (synced_names_.contains(*it)) continue;
      fs::remove_all(*it);
    }
  }

 private:
  static uint64_t inode_of(const std::string& path) {
    struct stat info {};
    stat(path.c_str(), &info);
    return info.st_ino;
  }
  int64_t run(const IoRequest& r) {
    switch (r.op) {
      case IoOp::kOpen: {
        const int fd = open(r.path, r.flags, 0644);
        if (fd >= 0 && (r.flags & O_CREAT) != 0) {
          files_.insert(r.path);
          names_.push_back(r.path);
        }
        if (fd >= 0) paths_[fd] = r.path;
        return fd < 0 ? -errno : fd;
      }
      case IoOp::kWrite:
        return pwrite(r.fd, r.buffer, r.length, static_cast<off_t>(r.offset));
      case IoOp::kSync:
        return sync(r.fd);
      case IoOp::kRename:
        if (fs::exists(r.new_path) && r.flags != 0) return -EEXIST;
        fs::rename(r.path, r.new_path);
        files_.erase(r.path);
        files_.insert(r.new_path);
        names_.push_back(r.new_path);
        return 0;
      case IoOp::kClose:
        return close(r.fd);
      case IoOp::kMakeDirectory:
        if (mkdir(r.path, 0755) != 0) return -errno;
        names_.push_back(r.path);
        return 0;
      case IoOp::kUnlink:
        return unlink(r.path) == 0 ? 0 : -errno;
      case IoOp::kRead:
        break;
    }
    return -EINVAL;
  }
  int64_t sync(int fd) {
    const std::string path = paths_[fd];
    if (!fs::is_directory(path)) {
      synced_files_.insert(inode_of(path));
      return 0;
    }
    for (const std::string& name : names_) {
      if (fs::path(name).parent_path() == fs::path(path)) synced_names_.insert(name);
    }
    return 0;
  }

  const int death_;
  const Death how_;
  int count_ = 0;
  bool dead_ = false;
  std::deque<IoRequest> pending_;
  std::map<int, std::string> paths_;
  std::set<std::string> files_;
  std::vector<std::string> names_;  // every name ever made, in order
  std::set<std::string> synced_names_;
  std::set<uint64_t> synced_files_;
};

class StoreMatrixTest : public ::testing::TestWithParam<Durability> {
 protected:
  static constexpr uint32_t kBlocks = 3;

  void SetUp() override {
    options_.durability = GetParam();
    options_.stale_temporary_seconds = 0;
    options_.operation_timeout_ms = 0;
    for (uint32_t i = 0; i < kBlocks; ++i) fill(slots_[i], i);
  }
  void fill(uint32_t slot, uint64_t seed) {
    fill_random(pool_->region()->data() + pool_->payload_offset(slot), kLayout.full_block_bytes(),
                seed);
  }

  // Writes the chain over a queue that dies; returns whether it lived to the end.
  bool write_and_die(const std::string& root, int death, MortalQueue::Death how,
                     MortalQueue::Loss loss) {
    BlockStore store(root, root_key_, kLayout, options_);
    MortalQueue queue(death, how);
    StoreIo io(store, queue, *pool_);
    WriteJob job;
    job.chain = chain_;
    job.slots = slots_;
    io.begin(job);
    while (!queue.dead() && (!job.finished() || queue.in_flight() > 0)) {
      while (io.issue(job)) {
      }
      io.poll();
    }
    reported_ = job.stored;
    queue.lose_power(loss);
    return !queue.dead();
  }

  // Everything that can be seen is right; with fsync everything reported can be seen.
  void check(const std::string& root) {
    BlockStore store(root, root_key_, kLayout, options_);
    const uint64_t counted = store.stats().blocks;
    const auto into = acquire(*pool_, kBlocks);
    uint64_t good = 0;
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const std::span one = std::span(chain_).subspan(i, 1);
      const uint32_t got = store.get(one, *pool_, std::span(into).first(1));
      good += got;
      if (got == 1) {
        EXPECT_EQ(payload_of(*pool_, into[0], kLayout), payload_of(*pool_, slots_[i], kLayout));
      }
      if (GetParam() == Durability::kFsync && reported_[i]) {
        EXPECT_EQ(got, 1u) << "block " << i << " was reported as stored and is lost";
      }
    }
    EXPECT_EQ(counted, good + store.stats().corrupt) << "the accounting counts what isn't there";
    for (const uint32_t slot : into) pool_->release(slot);
    BlockStore again(root, root_key_, kLayout, options_);
    EXPECT_EQ(again.stats().blocks, good) << "corrupt files have been removed";
    for (const auto& entry : fs::recursive_directory_iterator(root)) {
      EXPECT_FALSE(entry.path().filename().string().starts_with(".tmp-")) << "never swept";
    }
  }

  const BlockKey root_key_ = make_key(1);
  const std::vector<BlockId> chain_ = make_chain(root_key_, kBlocks);
  StoreOptions options_;
  std::shared_ptr<BufferPool> pool_ = make_pool(kLayout, 2 * kBlocks);
  std::vector<uint32_t> slots_ = acquire(*pool_, kBlocks);
  std::vector<bool> reported_;
};

TEST_P(StoreMatrixTest, DeathAtEveryOperationLeavesOnlyWhatIsRight) {
  using Death = MortalQueue::Death;
  using Loss = MortalQueue::Loss;
  int operations = 0, deaths = 0;
  for (const Loss loss : {Loss::kNothing, Loss::kContents, Loss::kZeroes, Loss::kNames}) {
    for (const Death how : {Death::kBefore, Death::kTorn, Death::kAfter}) {
      for (int death = 0;; ++death) {
        const TemporaryDirectory directory;
        const std::string root = directory.path() + "/store";
        const bool lived = write_and_die(root, death, how, loss);
        check(root);
        ASSERT_FALSE(HasFailure()) << "death at operation " << death << ", how "
                                   << static_cast<int>(how) << ", loss " << static_cast<int>(loss);
        ++deaths;
        if (lived) {
          operations = death;
          EXPECT_EQ(reported_, std::vector<bool>(kBlocks, true));
          break;
        }
      }
    }
  }
  // open, write, rename, close and two directories a block; syncs of file and directories.
  EXPECT_GE(operations, static_cast<int>(kBlocks) * (GetParam() == Durability::kFsync ? 14 : 6));
  EXPECT_GE(deaths, 4 * 3 * operations);
}

INSTANTIATE_TEST_SUITE_P(Durabilities, StoreMatrixTest,
                         ::testing::Values(Durability::kNone, Durability::kFsync),
                         [](const auto& info) {
                           return info.param == Durability::kNone ? "none" : "fsync";
                         });

}  // namespace
}  // namespace kvtransfer
