#include "kvtransfer/block_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/fd.h"
#include "store/block_file.h"
#include "store/catalog.h"
#include "store/directory_scan.h"
#include "store/store_io.h"

namespace kvtransfer {

namespace fs = std::filesystem;

namespace {

constexpr char kManifestName[] = "KVTRANSFER";
constexpr char kLockName[] = "evict.lock";

bool probe_direct_io(const std::string& root) {
  const std::string path = root + "/" + kTemporaryPrefix + "probe-" + std::to_string(getpid());
  const Fd fd(open(path.c_str(), O_CREAT | O_WRONLY | O_DIRECT | O_CLOEXEC, 0644));
  unlink(path.c_str());
  return fd.valid();
}

}  // namespace

std::vector<BlockId> chain_ids(const BlockKey& root, std::span<const BlockKey> keys) {
  std::vector<BlockId> ids;
  ids.reserve(keys.size());
  BlockKey parent = root;
  for (const BlockKey& key : keys) {
    ids.push_back({key, parent});
    parent = key;
  }
  return ids;
}

BlockStore::BlockStore(const std::string& root, const BlockKey& name_space,
                       const BlockLayout& layout, const StoreOptions& options)
    : root_(root),
      name_space_(name_space),
      layout_(layout),
      options_(options),
      header_bytes_(header_pages_bytes(layout.num_layers())),
      catalog_(std::make_unique<Catalog>(name_space)) {
  open_root();
  check_manifest();
  direct_io_ = probe_direct_io(root_);
  rescan();
}

BlockStore::~BlockStore() = default;

void BlockStore::open_root() {
  std::error_code code;
  fs::create_directories(root_, code);
  if (code || !fs::is_directory(root_, code)) {
    throw Error(ErrorCode::kIo, "store directory " + root_ + " can't be used",
                code ? code.value() : ENOTDIR);
  }
}

void BlockStore::check_manifest() {
  const std::string path = root_ + "/" + kManifestName;
  const std::string wanted = "kvtransfer block store, format " +
                             std::to_string(kBlockFormatVersion) + "\nnamespace " +
                             to_hex(name_space_) + "\nlayout " + layout_.to_string() + " #" +
                             std::to_string(layout_.digest()) + "\n";
  if (!fs::exists(path)) {
    // Written under another name and linked, so that two processes starting at once agree.
    const std::string temporary =
        root_ + "/" + kTemporaryPrefix + "manifest-" + std::to_string(getpid());
    std::ofstream(temporary, std::ios::binary) << wanted;
    [[maybe_unused]] const int rc = link(temporary.c_str(), path.c_str());
    unlink(temporary.c_str());
  }
  std::ifstream file(path, std::ios::binary);
  std::string found(4096, '\0');
  file.read(found.data(), static_cast<std::streamsize>(found.size()));
  found.resize(static_cast<size_t>(file.gcount()));
  if (found != wanted) {
    throw Error(ErrorCode::kMismatch,
                "store " + root_ + " was made for another format, namespace or layout; found [" +
                    found + "], this run needs [" + wanted + "]: use another store directory");
  }
}

std::string BlockStore::directory_of(const BlockId& id) const {
  const std::string hex = to_hex(std::span(id.key).first(2));
  return root_ + "/" + hex.substr(0, 2) + "/" + hex.substr(2, 2);
}

std::string BlockStore::path_of(const BlockId& id) const {
  return directory_of(id) + "/" + block_name(id);
}

bool BlockStore::exists(const BlockId& id) noexcept {
  struct stat info;
  return stat(path_of(id).c_str(), &info) == 0 &&
         static_cast<uint64_t>(info.st_size) == file_bytes();
}

uint32_t BlockStore::lookup(std::span<const BlockId> chain) noexcept {
  uint32_t found = 0;
  while (found < chain.size()) {
    {
      const std::lock_guard lock(mutex_);
      while (found < chain.size() && catalog_->touch(chain[found].key)) ++found;
      if (found == chain.size()) break;
    }
    // Not known here; another process may have written it since.
    if (!exists(chain[found])) break;
    const std::lock_guard lock(mutex_);
    catalog_->insert(chain[found]);
    ++found;
  }
  const std::lock_guard lock(mutex_);
  stats_.hits += found;
  stats_.misses += chain.size() - found;
  return found;
}

bool BlockStore::contains(const BlockId& id) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (catalog_->contains(id.key)) return true;
  }
  return exists(id);
}

void BlockStore::forget(const BlockKey& key) noexcept {
  const std::lock_guard lock(mutex_);
  catalog_->erase(key);
}

void BlockStore::pin(std::span<const BlockId> chain) noexcept {
  const std::lock_guard lock(mutex_);
  for (const BlockId& id : chain) catalog_->pin(id.key);
}

void BlockStore::unpin(std::span<const BlockId> chain) noexcept {
  const std::lock_guard lock(mutex_);
  for (const BlockId& id : chain) catalog_->unpin(id.key);
}

StoreStats BlockStore::stats() const {
  const std::lock_guard lock(mutex_);
  StoreStats stats = stats_;
  stats.blocks = catalog_->size();
  stats.bytes = stats.blocks * file_bytes();
  return stats;
}

bool BlockStore::space_left() noexcept {
  struct statvfs info;
  if (statvfs(root_.c_str(), &info) != 0) return true;  // let the write itself say what is wrong
  return uint64_t{info.f_bavail} * info.f_frsize >= options_.free_space_floor + file_bytes();
}

// True when one block more than there are and will be breaks the cap.
bool BlockStore::over_cap() const noexcept {
  const std::lock_guard lock(mutex_);
  return options_.max_bytes != 0 &&
         (catalog_->size() + writing_ + 1) * file_bytes() > options_.max_bytes;
}

bool BlockStore::admit_write() noexcept {
  if (over_cap()) evict();
  const bool over = over_cap();
  const bool admitted = !over && space_left();
  const std::lock_guard lock(mutex_);
  if (admitted) ++writing_;
  if (!admitted) ++stats_.refused_full;
  if (!admitted && !stats_.writes_stopped) {
    fprintf(stderr, "kvtransfer: store %s is full (%s): writes stop, reads go on\n", root_.c_str(),
            over ? "byte cap, nothing left to evict" : "free space floor");
  }
  stats_.writes_stopped = !admitted;
  return admitted;
}

void BlockStore::end_writes(uint32_t admitted) noexcept {
  const std::lock_guard lock(mutex_);
  writing_ -= std::min<uint64_t>(admitted, writing_);
}

void BlockStore::published(const BlockId& id, bool duplicate) noexcept {
  const std::lock_guard lock(mutex_);
  catalog_->insert(id);
  ++(duplicate ? stats_.duplicates : stats_.published);
  stats_.writes_stopped = false;
}

void BlockStore::write_failed(int error) noexcept {
  const std::lock_guard lock(mutex_);
  ++stats_.refused_full;
  if (!stats_.writes_stopped) {
    fprintf(stderr, "kvtransfer: store %s: %s: writes stop, reads go on\n", root_.c_str(),
            strerror(error));
  }
  stats_.writes_stopped = true;
}

void BlockStore::read_failed(const BlockId& id, bool corrupt) noexcept {
  if (corrupt) unlink(path_of(id).c_str());
  const std::lock_guard lock(mutex_);
  catalog_->erase(id.key);
  if (corrupt) ++stats_.corrupt;
}

void BlockStore::rescan() {
  const DirectoryScan scan = scan_directory(root_, file_bytes(), options_.stale_temporary_seconds);
  const std::lock_guard lock(mutex_);
  catalog_->replace(scan.blocks);
  stats_.swept_temporaries += scan.swept_temporaries;
}

uint64_t BlockStore::evict() {
  if (options_.max_bytes == 0) return 0;
  const std::string lock_path = root_ + "/" + kLockName;
  const Fd lock(open(lock_path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (!lock.valid() || flock(lock.get(), LOCK_EX) != 0) return 0;
  rescan();  // others write and evict too
  return remove_leaves(options_.max_bytes - options_.max_bytes / 20);
}

uint64_t BlockStore::remove_leaves(uint64_t target_bytes) {
  std::vector<BlockId> plan;
  {
    const std::lock_guard guard(mutex_);
    // Room for what is being written and one more, whatever the hysteresis leaves.
    const uint64_t most = options_.max_bytes / file_bytes();
    const uint64_t room = most - std::min(most, writing_ + 1);
    plan = catalog_->plan_eviction(std::min(target_bytes / file_bytes(), room));
  }
  uint64_t removed = 0;
  for (const BlockId& id : plan) {
    const bool gone = unlink(path_of(id).c_str()) == 0 || errno == ENOENT;
    const std::lock_guard guard(mutex_);
    if (gone) {
      catalog_->erase(id.key);
      ++stats_.evicted;
      ++removed;
    } else {
      ++stats_.unremovable;  // skipped; the rest of the plan goes on
    }
  }
  return removed;
}

uint32_t BlockStore::get(std::span<const BlockId> chain, BufferPool& pool,
                         std::span<const uint32_t> slots) {
  const auto queue = IoQueue::create({.backend = IoBackend::kAuto});
  StoreIo io(*this, *queue, pool);
  return io.read_now(chain, slots);
}

uint32_t BlockStore::put(std::span<const BlockId> chain, BufferPool& pool,
                         std::span<const uint32_t> slots, uint32_t valid_tokens_of_last) {
  const auto queue = IoQueue::create({.backend = IoBackend::kAuto});
  StoreIo io(*this, *queue, pool);
  return io.write_now(chain, slots, valid_tokens_of_last);
}

}  // namespace kvtransfer
