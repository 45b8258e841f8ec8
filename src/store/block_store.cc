#include "kvtransfer/block_store.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "base/fd.h"
#include "base/histogram.h"
#include "store/block_file.h"
#include "store/catalog.h"
#include "store/directory_scan.h"
#include "store/manifest.h"
#include "store/mount.h"
#include "store/store_io.h"

namespace kvtransfer {

struct StoreLatencies {
  Histogram read, write;
};

namespace {

// Blocks per step of merging a scan: lookups wait for one step at most, some 100 us.
constexpr uint32_t kMergeStep = 1000;

// Asked of a file that is there on a read-only file system, too.
bool probe_direct_io(const std::string& root) {
  return Fd(open((root + "/" + kManifestName).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC)).valid();
}

bool probe_in_memory(const std::string& root) {
  struct statfs info;
  return statfs(root.c_str(), &info) == 0 && info.f_type == TMPFS_MAGIC;
}

// Whether each path is a file of exactly that size; stops after the first that isn't if asked to.
std::vector<bool> stat_files(const std::vector<std::string>& paths, uint64_t bytes, bool prefix) {
  std::vector<bool> there(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) {
    struct stat info;
    there[i] = stat(paths[i].c_str(), &info) == 0 && static_cast<uint64_t>(info.st_size) == bytes;
    if (prefix && !there[i]) break;
  }
  return there;
}

std::optional<DirectoryScan> scan_mount(BlockStore& store, ScanDetail detail) {
  return store.mount().sweep<DirectoryScan>(
      [root = store.root(), bytes = store.file_bytes(),
       stale = store.options().stale_temporary_seconds,
       detail] { return scan_directory(root, bytes, stale, detail); });
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
      mount_(std::make_unique<Mount>(root, int64_t{options.operation_timeout_ms} * 1'000'000)),
      latencies_(std::make_unique<StoreLatencies>()),
      catalog_(std::make_unique<Catalog>(name_space)) {
  options.encoding.check(layout);
  // By value: if the mount hangs, the work may outlive this.
  const std::string manifest = manifest_text({name_space_, layout_, options.encoding});
  const auto opened =
      mount_->sweep<Outcome>([root, manifest] { return open_store_directory(root, manifest); });
  if (opened && !opened->ok()) throw Error(opened->code, opened->text, opened->sys_errno);
  if (!opened || !scan(ScanDetail::kNames)) {
    throw Error(ErrorCode::kTimeout, "store " + root + ": the file system doesn't answer");
  }
  direct_io_ = mount_->ask<bool>([root] { return probe_direct_io(root); }).value_or(false);
  in_memory_ = mount_->ask<bool>([root] { return probe_in_memory(root); }).value_or(false);
  if (options.max_bytes != 0 || options.free_space_floor != 0) {
    keeper_ = std::thread([this] { keep(); });
  }
}

BlockStore::~BlockStore() {
  if (!keeper_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  keeper_wake_.notify_all();
  keeper_.join();
}

std::unique_ptr<BlockStore> BlockStore::open_existing(const std::string& root,
                                                      const StoreOptions& options) {
  const Manifest manifest = parse_manifest(read_manifest(root));
  StoreOptions as_there = options;
  as_there.encoding = manifest.encoding;
  return std::make_unique<BlockStore>(root, manifest.name_space, manifest.layout, as_there);
}

std::string BlockStore::directory_of(const BlockId& id) const {
  const std::string hex = to_hex(std::span(id.key).first(2));
  return root_ + "/" + hex.substr(0, 2) + "/" + hex.substr(2, 2);
}

std::string BlockStore::path_of(const BlockId& id) const {
  return directory_of(id) + "/" + block_name(id);
}

std::vector<bool> BlockStore::find_existing(std::span<const BlockId> ids, bool prefix) noexcept {
  if (ids.empty()) return {};
  std::vector<std::string> paths;
  for (const BlockId& id : ids) paths.push_back(path_of(id));
  const auto there =
      mount_->ask<std::vector<bool>>([paths = std::move(paths), bytes = file_bytes(), prefix] {
        return stat_files(paths, bytes, prefix);
      });
  return there.value_or(std::vector<bool>(ids.size()));
}

uint32_t BlockStore::lookup(std::span<const BlockId> chain) noexcept {
  uint32_t found = 0;
  if (!mount_->slow()) {
    {
      const std::shared_lock lock(catalog_mutex_);
      while (found < chain.size() && catalog_->touch(chain[found].key)) ++found;
    }
    // Not known here; another process may have written the rest since.
    const auto there = find_existing(chain.subspan(found), true);
    const auto more =
        static_cast<uint32_t>(std::find(there.begin(), there.end(), false) - there.begin());
    if (more > 0) {
      const std::unique_lock lock(catalog_mutex_);
      for (const BlockId& id : chain.subspan(found, more)) catalog_->insert(id);
    }
    found += more;
  }
  const std::lock_guard lock(mutex_);
  stats_.hits += found;
  stats_.misses += chain.size() - found;
  return found;
}

bool BlockStore::known(const BlockId& id) const noexcept {
  const std::shared_lock lock(catalog_mutex_);
  return catalog_->contains(id.key);
}

bool BlockStore::contains(const BlockId& id) noexcept {
  return known(id) || find_existing({&id, 1}, false)[0];
}

void BlockStore::forget(const BlockKey& key) noexcept {
  const std::unique_lock lock(catalog_mutex_);
  catalog_->erase(key);
}

void BlockStore::pin(std::span<const BlockId> chain) noexcept {
  const std::unique_lock lock(catalog_mutex_);
  for (const BlockId& id : chain) catalog_->pin(id.key);
}

void BlockStore::unpin(std::span<const BlockId> chain) noexcept {
  const std::unique_lock lock(catalog_mutex_);
  for (const BlockId& id : chain) catalog_->unpin(id.key);
}

StoreStats BlockStore::stats() const {
  StoreStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats = stats_;
  }
  const std::shared_lock lock(catalog_mutex_);
  stats.blocks = catalog_->size();
  stats.bytes = stats.blocks * file_bytes();
  stats.mount_slow = mount_->slow();
  return stats;
}

void BlockStore::end_writes(uint32_t reserved) noexcept {
  const std::lock_guard lock(mutex_);
  writing_ -= std::min<uint64_t>(reserved, writing_);
}

void BlockStore::published(const BlockId& id, bool duplicate) noexcept {
  {
    const std::unique_lock lock(catalog_mutex_);
    catalog_->insert(id);
  }
  const std::lock_guard lock(mutex_);
  ++(duplicate ? stats_.duplicates : stats_.published);
  ++unscanned_;
  stats_.writes_stopped = false;
}

void BlockStore::write_failed(const std::string& why) noexcept {
  const std::lock_guard lock(mutex_);
  ++stats_.refused_full;
  say_full(why);
}

// REQUIRES: mutex_ is held.
void BlockStore::say_full(const std::string& why) noexcept {
  if (!stats_.writes_stopped) {
    fprintf(stderr, "kvtransfer: store %s: %s: writes stop, reads go on\n", root_.c_str(),
            why.c_str());
  }
  stats_.writes_stopped = true;
}

void BlockStore::read_failed(const BlockId& id, bool corrupt) noexcept {
  forget(id.key);
  const std::lock_guard lock(mutex_);
  if (corrupt) ++stats_.corrupt;
}

int64_t BlockStore::read_latency_ns(double share) const noexcept {
  return latencies_->read.percentile(share);
}
int64_t BlockStore::write_latency_ns(double share) const noexcept {
  return latencies_->write.percentile(share);
}
void BlockStore::record_read_latency(int64_t ns) noexcept {
  latencies_->read.record(ns);
}
void BlockStore::record_write_latency(int64_t ns) noexcept {
  latencies_->write.record(ns);
}

bool BlockStore::rescan() {
  return scan(ScanDetail::kFiles);
}

bool BlockStore::scan(ScanDetail detail) {
  {
    const std::unique_lock lock(catalog_mutex_);
    catalog_->begin_scan();
  }
  {
    const std::lock_guard lock(mutex_);
    unscanned_ = 0;
  }
  const auto scanned = scan_mount(*this, detail);
  if (!scanned) return false;
  const std::span found(scanned->blocks);
  {
    const std::unique_lock lock(catalog_mutex_);
    catalog_->reserve(found.size());
  }
  for (size_t at = 0; at < found.size(); at += kMergeStep) {
    const std::unique_lock lock(catalog_mutex_);
    catalog_->merge(found.subspan(at, std::min<size_t>(kMergeStep, found.size() - at)));
  }
  for (bool done = false; !done;) {
    const std::unique_lock lock(catalog_mutex_);
    done = catalog_->sweep(8 * kMergeStep);
  }
  const std::lock_guard lock(mutex_);
  stats_.swept_temporaries += scanned->swept_temporaries;
  return true;
}

std::vector<std::pair<BlockId, uint64_t>> BlockStore::list() {
  auto scanned = scan_mount(*this, ScanDetail::kFiles);
  if (!scanned) {
    throw Error(ErrorCode::kTimeout, "store " + root_ + ": the file system doesn't answer");
  }
  return std::move(scanned->blocks);
}

std::string BlockStore::check_file(const std::string& path, const BlockId& id, BufferPool& pool,
                                   uint32_t slot) const {
  if (pool.header_bytes() != header_bytes_ || pool.slot_bytes() < slot_bytes()) {
    return "the pool's slots don't fit";
  }
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info;
  if (!fd.valid() || fstat(fd.get(), &info) != 0) return std::string("open: ") + strerror(errno);
  if (static_cast<uint64_t>(info.st_size) != file_bytes()) {
    return "it has " + std::to_string(info.st_size) + " bytes, not " + std::to_string(file_bytes());
  }
  uint8_t* at = pool.slot_data(slot);
  for (uint64_t done = 0; done < file_bytes();) {
    const ssize_t got = pread(fd.get(), at + done, file_bytes() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? std::string("read: ") + strerror(errno) : "it ends early";
    done += static_cast<uint64_t>(got);
  }
  const std::string why = check_header(at, *this, id);
  if (!why.empty()) return "header: " + why;
  for (uint32_t layer = 0; layer < layout_.num_layers(); ++layer) {
    if (!check_layer(at, at + header_bytes_ + stored_offset(layer), *this, layer)) {
      return "checksum of layer " + std::to_string(layer) + " differs";
    }
  }
  return {};
}

uint32_t BlockStore::get(std::span<const BlockId> chain, BufferPool& pool,
                         std::span<const uint32_t> slots) {
  const auto queue = IoQueue::create(suited_to(*this, {}));
  StoreIo io(*this, *queue, pool);
  return io.read_now(chain, slots);
}

uint32_t BlockStore::put(std::span<const BlockId> chain, BufferPool& pool,
                         std::span<const uint32_t> slots, uint32_t valid_tokens_of_last) {
  const auto queue = IoQueue::create(suited_to(*this, {}));
  StoreIo io(*this, *queue, pool);
  return io.write_now(chain, slots, valid_tokens_of_last);
}

}  // namespace kvtransfer
