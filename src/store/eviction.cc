// The half of BlockStore that keeps it from filling up: admission, eviction, the keeper thread.
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/fd.h"
#include "kvtransfer/block_store.h"
#include "store/catalog.h"
#include "store/mount.h"

namespace kvtransfer {

namespace {

constexpr char kLockName[] = "evict.lock";
constexpr int64_t kSpaceAgeNs = 100'000'000;
// Plans whose files can't be removed are made anew without them, but not for ever.
constexpr int kMostPlans = 8;
constexpr size_t kRemovedAtOnce = 1024;
// Blocks written between two looks at the directory, where only a floor is set.
constexpr uint64_t kUncappedStep = 1024;

Fd lock_directory(const std::string& root) {
  Fd lock(open((root + "/" + kLockName).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (lock.valid() && flock(lock.get(), LOCK_EX) != 0) lock.reset();
  return lock;
}

// Which of the files are gone now.
std::vector<bool> remove_files(const std::vector<std::string>& paths) {
  std::vector<bool> gone;
  gone.reserve(paths.size());
  for (const std::string& path : paths) {
    gone.push_back(unlink(path.c_str()) == 0 || errno == ENOENT);
  }
  return gone;
}

}  // namespace

uint64_t BlockStore::known_blocks() const noexcept {
  const std::shared_lock lock(catalog_mutex_);
  return catalog_->size();
}

// Bytes above the floor, for blocks that are not reserved yet; negative below it.
int64_t BlockStore::spare_bytes() noexcept {
  constexpr int64_t kPlenty = int64_t{1} << 62;
  if (options_.free_space_floor == 0) return kPlenty;
  const int64_t now = now_ns();
  {
    const std::lock_guard lock(mutex_);
    if (space_checked_ns_ != 0 && now - space_checked_ns_ < kSpaceAgeNs) {
      return spare_bytes_ - static_cast<int64_t>(writing_ * file_bytes());
    }
  }
  const auto free_bytes = mount_->ask<uint64_t>([root = root_]() -> uint64_t {
    struct statvfs info;
    if (statvfs(root.c_str(), &info) != 0) return UINT64_MAX >> 2;  // the write will say
    return uint64_t{info.f_bavail} * info.f_frsize;
  });
  const std::lock_guard lock(mutex_);
  space_checked_ns_ = now;
  spare_bytes_ = static_cast<int64_t>(free_bytes.value_or(0)) -
                 static_cast<int64_t>(std::min(options_.free_space_floor, UINT64_MAX >> 2));
  return spare_bytes_ - static_cast<int64_t>(writing_ * file_bytes());
}

Admission BlockStore::admit(std::span<const BlockId> chain) noexcept {
  std::vector<BlockId> unknown;
  for (const BlockId& id : chain) {
    if (!known(id)) unknown.push_back(id);
  }
  const auto there = find_existing(unknown, false);
  Admission admission;
  size_t next = 0;
  for (const BlockId& id : chain) {
    const bool asked = next < unknown.size() && unknown[next].key == id.key;
    const bool is_new = asked && !there[next++];
    if (is_new && !admit_one()) break;
    admission.reserved += is_new ? 1 : 0;
    ++admission.blocks;
  }
  return admission;
}

bool BlockStore::admit_one() noexcept {
  const auto over_cap = [&] {
    if (options_.max_bytes == 0) return false;
    const uint64_t blocks = known_blocks();
    const std::lock_guard lock(mutex_);
    return (blocks + writing_ + 1) * file_bytes() > options_.max_bytes;
  };
  const auto no_space = [&] { return spare_bytes() < static_cast<int64_t>(file_bytes()); };
  if (over_cap() || no_space()) evict();
  const bool over = over_cap();
  const bool admitted = !over && !no_space() && !mount_->slow();
  const std::lock_guard lock(mutex_);
  if (admitted) {
    ++writing_;
    stats_.writes_stopped = false;
    const uint64_t step =
        options_.max_bytes != 0 ? options_.max_bytes / file_bytes() / 100 : kUncappedStep;
    if (bounded() && !keeper_wanted_ && unscanned_ > step) {
      keeper_wanted_ = true;
      keeper_wake_.notify_all();
    }
  } else {
    ++stats_.refused_full;
    say_full(mount_->slow() ? "the mount doesn't answer"
             : over         ? "full: byte cap, nothing left to evict"
                            : "full: free space floor");
  }
  return admitted;
}

// So that cap and floor hold with 5 % of the cap to spare, and there is room for what is being
// written and one more, whatever that leaves.
uint64_t BlockStore::blocks_to_keep() noexcept {
  const int64_t spare = spare_bytes();
  const uint64_t known = known_blocks();
  const std::lock_guard lock(mutex_);
  uint64_t keep = known;
  if (options_.max_bytes != 0) {
    const uint64_t most = options_.max_bytes / file_bytes();
    const uint64_t hysteresis = (options_.max_bytes - options_.max_bytes / 20) / file_bytes();
    keep = std::min({keep, hysteresis, most - std::min(most, writing_ + 1)});
  }
  const auto wanted = static_cast<int64_t>(file_bytes());
  if (spare < wanted) {
    const uint64_t blocks = static_cast<uint64_t>(wanted - spare) / file_bytes() + 1;
    keep = std::min(keep, known - std::min(known, blocks));
  }
  return keep;
}

uint64_t BlockStore::evict() {
  if (!bounded()) return 0;
  const uint64_t before = evictions_.load(std::memory_order_acquire);
  const std::lock_guard one(evict_mutex_);
  if (evictions_.load(std::memory_order_acquire) != before) return 0;  // done while we waited
  auto lock = mount_->sweep<Fd>([root = root_] { return lock_directory(root); });
  if (!lock || !lock->valid() || !rescan()) return 0;  // others write and evict, too
  const uint64_t removed = remove_leaves();
  mount_->post([fd = lock->release()] { close(fd); });
  evictions_.fetch_add(1, std::memory_order_release);
  return removed;
}

uint64_t BlockStore::remove_leaves() {
  uint64_t removed = 0;
  for (int round = 0; round < kMostPlans; ++round) {
    const uint64_t keep = blocks_to_keep();
    std::vector<BlockId> plan;
    {
      const std::shared_lock lock(catalog_mutex_);
      plan = catalog_->plan_eviction(keep);
    }
    const size_t planned = plan.size();
    const std::vector<BlockId> stuck = remove(std::move(plan));
    removed += planned - stuck.size();
    if (stuck.empty()) break;
    // Skipped and used last: the next plan takes others in their place.
    const std::shared_lock lock(catalog_mutex_);
    for (const BlockId& id : stuck) catalog_->touch(id.key);
  }
  return removed;
}

// Returns those that could not be removed.
std::vector<BlockId> BlockStore::remove(std::vector<BlockId> plan) {
  std::vector<BlockId> stuck;
  for (size_t at = 0; at < plan.size(); at += kRemovedAtOnce) {
    const auto batch = std::span(plan).subspan(at, std::min(kRemovedAtOnce, plan.size() - at));
    std::vector<std::string> paths;
    for (const BlockId& id : batch) paths.push_back(path_of(id));
    const auto gone = mount_->sweep<std::vector<bool>>(
        [paths = std::move(paths)] { return remove_files(paths); });
    uint64_t removed = 0;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (gone && (*gone)[i]) {
        forget(batch[i].key);
        ++removed;
      } else {
        stuck.push_back(batch[i]);
      }
    }
    const std::lock_guard lock(mutex_);
    stats_.evicted += removed;
    stats_.unremovable += batch.size() - removed;
    space_checked_ns_ = 0;
  }
  return stuck;
}

// Looks again whenever this process has written 1 % of the cap: other writers' blocks become known,
// and eviction is over before a writer has to wait for it.
void BlockStore::keep() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    keeper_wake_.wait(lock, [this] { return stopping_ || keeper_wanted_; });
    if (stopping_) return;
    lock.unlock();
    if (rescan()) {
      const uint64_t known = known_blocks();
      const uint64_t high = options_.max_bytes - options_.max_bytes / 40;  // 2.5 % below the cap
      const bool near_cap = options_.max_bytes != 0 && known * file_bytes() > high;
      if (near_cap || spare_bytes() < static_cast<int64_t>(file_bytes())) evict();
    }
    lock.lock();
    keeper_wanted_ = false;
  }
}

}  // namespace kvtransfer
