// BlockStore: Full Blocks as files of one directory, found by chained keys.
//
// The directory is the truth and may be shared by any number of processes and hosts; a process's
// catalog is a cache of it. docs/block_format.md draws the file and says what is promised after a
// crash.
//
// Thread safety: all methods may be called from any thread (the catalog has one lock, held for
// table operations only, never across a system call). No call waits longer for the file system than
// StoreOptions::operation_timeout_ms (opening, evicting and scanning: 20 times that) but get() and
// put(): the slots are their caller's, so they return when the kernel has given them back.
// Invariants:
//  1. A block is visible under its final name only when complete (temporary name, then rename).
//  2. What get() reports as loaded passed the header check (format, namespace, key, parent, layout)
//     and the checksum of each of its layers; anything else is a miss and the prefix before it is
//     kept. A corrupt file is removed so that its recomputed block can take its place.
//  3. The first published block of a key wins; a later put of the same key changes nothing.
//  4. Eviction takes leaves of the key trie only, least recently used first, never a pinned block.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvtransfer/block_encoding.h"
#include "kvtransfer/block_layout.h"
#include "kvtransfer/buffer_pool.h"
#include "kvtransfer/error.h"
#include "kvtransfer/io_queue.h"

namespace kvtransfer {

// An opaque 32-byte name: ours (chained SHA-256) or an engine's own hash, zero-padded.
using BlockKey = std::array<uint8_t, 32>;

// A block's name and its predecessor's; the first block's parent is the namespace digest.
struct BlockId {
  BlockKey key;
  BlockKey parent;
};

// keys -> ids of a chain that starts under `root` (the namespace digest).
std::vector<BlockId> chain_ids(const BlockKey& root, std::span<const BlockKey> keys);

enum class Durability : uint8_t { kNone, kFsync };

struct StoreOptions {
  uint64_t max_bytes = 0;         // 0: no cap
  uint64_t free_space_floor = 0;  // bytes of the file system never to be used
  Durability durability = Durability::kNone;
  uint32_t stale_temporary_seconds = 300;  // age from which a temporary of a dead writer is swept
  // An operation without an answer for so long makes its block a miss, and the store a miss until
  // the mount answers again. 0: wait for ever.
  uint32_t operation_timeout_ms = 10'000;
  bool verify_checksums = true;
  bool remove_corrupt = true;  // so that a recomputed block can take its place
  BlockEncoding encoding;      // of the files; the same for all that share the directory
};

struct StoreStats {
  uint64_t blocks = 0;
  uint64_t bytes = 0;  // file bytes, as accounted against max_bytes
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t published = 0;
  uint64_t duplicates = 0;
  uint64_t evicted = 0;
  uint64_t corrupt = 0;
  uint64_t unremovable = 0;
  uint64_t swept_temporaries = 0;
  uint64_t refused_full = 0;
  bool writes_stopped = false;
  bool mount_slow = false;  // an operation is overdue
};

// Of the memory tier in front of a store (TrafficOptions::memory_blocks), in blocks.
struct MemoryTierStats {
  uint64_t capacity = 0;
  uint64_t blocks = 0;
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t admitted = 0;
  uint64_t evicted = 0;
};

// How much of a chain may be written: its first `blocks`, of which `reserved` are new.
struct Admission {
  uint32_t blocks = 0;
  uint32_t reserved = 0;
};

class Catalog;
class Mount;
enum class ScanDetail : uint8_t;
struct StoreLatencies;

class BlockStore {
 public:
  // Opens or creates `root`. Throws Error(kMismatch) when the directory was made for another format
  // version, namespace, layout or encoding (it says which), Error(kInvalidArgument) when the
  // encoding doesn't suit the layout, Error(kIo) when the directory can't be used, Error(kTimeout)
  // when it doesn't answer.
  BlockStore(const std::string& root, const BlockKey& name_space, const BlockLayout& layout,
             const StoreOptions& options = {});
  ~BlockStore();

  // Opens what is there, whatever namespace, layout and encoding it is for. Throws also
  // Error(kMismatch) when the manifest makes no sense.
  static std::unique_ptr<BlockStore> open_existing(const std::string& root,
                                                   const StoreOptions& options = {});

  // Length of the restorable prefix of a chain: how many leading blocks are there now. A promise of
  // nothing: a block may be evicted before it is read, then the read reports a shorter prefix.
  uint32_t lookup(std::span<const BlockId> chain) noexcept;
  bool contains(const BlockId& id) noexcept;
  // Drops cached knowledge of a block that turned out missing or bad.
  void forget(const BlockKey& key) noexcept;

  // Blocking conveniences; the traffic manager moves the same bytes asynchronously.
  // Reads chain[i] into pool slot slots[i]; returns the length of the prefix that is good.
  uint32_t get(std::span<const BlockId> chain, BufferPool& pool, std::span<const uint32_t> slots);
  // Writes Full Blocks from pool slots. Returns how many are in the store afterwards (new or
  // already there); stops at a full disk. `valid_tokens` below block_tokens marks a partial last
  // block.
  uint32_t put(std::span<const BlockId> chain, BufferPool& pool, std::span<const uint32_t> slots,
               uint32_t valid_tokens_of_last = 0);

  // Evicts until cap and free-space floor hold with 5 % of the cap to spare; returns the blocks
  // removed. One process at a time does it (a lock file); a rescan first makes the accounting
  // honest. A thread of the store does the same before the cap is reached, and rescans whenever
  // this process has written 1 % of it. Between two scans the cap may be passed by what others
  // write.
  uint64_t evict();
  // Re-reads the directory: blocks, bytes, stale temporaries. False when the mount didn't answer;
  // then nothing changes. Opening reads the names alone: until the first rescan a file of the wrong
  // size counts as a block (reading it is a miss).
  bool rescan();
  // What lies in the directory now, with file times (ns since 1970). Throws Error(kTimeout).
  std::vector<std::pair<BlockId, uint64_t>> list();
  // Reads the file at `path`, wherever it lies, into a pool slot. Empty when it is the block `id`
  // of this store, whole and right; else why not.
  std::string check_file(const std::string& path, const BlockId& id, BufferPool& pool,
                         uint32_t slot) const;

  // Pinned blocks are not evicted by this process.
  void pin(std::span<const BlockId> chain) noexcept;
  void unpin(std::span<const BlockId> chain) noexcept;

  const std::string& root() const noexcept { return root_; }
  const BlockKey& name_space() const noexcept { return name_space_; }
  const BlockLayout& layout() const noexcept { return layout_; }
  const StoreOptions& options() const noexcept { return options_; }
  // Bytes of header pages in front of the payload: what a BufferPool for this store needs.
  uint32_t header_bytes() const noexcept { return header_bytes_; }
  uint64_t file_bytes() const noexcept {
    return BufferPool::slot_bytes(header_bytes_, stored_offset(layout_.num_layers()));
  }
  // Of a pool slot for this store: header pages and Full Block, at least file_bytes().
  uint64_t slot_bytes() const noexcept {
    return BufferPool::slot_bytes(header_bytes_, layout_.full_block_bytes());
  }
  // Where a layer's bytes lie in the file, after the header pages.
  uint64_t stored_offset(uint32_t layer) const noexcept {
    return options_.encoding.stored_bytes(layout_.layer_offset(layer));
  }
  // tmpfs: reading is a copy, which io_uring would hand to other threads.
  bool in_memory() const noexcept { return in_memory_; }
  // False when the file system refuses O_DIRECT (then reads go through the page cache).
  bool direct_io() const noexcept { return direct_io_; }
  StoreStats stats() const;
  // Nanoseconds within which a share of all blocks was read (opened, read) or written (until its
  // name was there); at most an eighth too much.
  int64_t read_latency_ns(double share) const noexcept;
  int64_t write_latency_ns(double share) const noexcept;

  std::string path_of(const BlockId& id) const;
  std::string directory_of(const BlockId& id) const;

  // --- for the asynchronous reader and writer (src/store/store_io.h) ---
  // Reserves room for the blocks of a chain that aren't there yet, evicting if need be. Shorter
  // than the chain: full (the cap can't be met, or no space on the device), which it says once on
  // standard error. `reserved` is paid back by end_writes().
  Admission admit(std::span<const BlockId> chain) noexcept;
  void end_writes(uint32_t reserved) noexcept;
  // In the catalog; asks nobody.
  bool known(const BlockId& id) const noexcept;
  void published(const BlockId& id, bool duplicate) noexcept;
  void write_failed(const std::string& why) noexcept;
  void read_failed(const BlockId& id, bool corrupt) noexcept;
  void record_read_latency(int64_t ns) noexcept;
  void record_write_latency(int64_t ns) noexcept;
  Mount& mount() noexcept { return *mount_; }

 private:
  bool scan(ScanDetail detail);
  std::vector<bool> find_existing(std::span<const BlockId> ids, bool prefix) noexcept;
  void say_full(const std::string& why) noexcept;

  // Eviction (src/store/eviction.cc).
  bool bounded() const noexcept {
    return options_.max_bytes != 0 || options_.free_space_floor != 0;
  }
  bool admit_one() noexcept;
  uint64_t known_blocks() const noexcept;
  int64_t spare_bytes() noexcept;
  uint64_t blocks_to_keep() noexcept;
  uint64_t remove_leaves();
  std::vector<BlockId> remove(std::vector<BlockId> plan);
  void keep() noexcept;

  std::string root_;
  BlockKey name_space_;
  BlockLayout layout_;
  StoreOptions options_;
  uint32_t header_bytes_;
  bool direct_io_ = true;
  bool in_memory_ = false;
  std::unique_ptr<Mount> mount_;
  std::unique_ptr<StoreLatencies> latencies_;

  std::mutex evict_mutex_;              // one eviction at a time; taken before the others
  std::atomic<uint64_t> evictions_{0};  // release pairs with the acquire of one that waited

  mutable std::shared_mutex catalog_mutex_;  // guards catalog_; never held together with mutex_
  std::unique_ptr<Catalog> catalog_;

  mutable std::mutex mutex_;  // guards what follows, but keeper_
  StoreStats stats_;
  uint64_t writing_ = 0;    // reserved and not ended
  uint64_t unscanned_ = 0;  // blocks published since the last rescan
  int64_t space_checked_ns_ = 0;
  int64_t spare_bytes_ = 0;  // of the file system above the floor, then
  bool keeper_wanted_ = false;
  bool stopping_ = false;
  std::condition_variable keeper_wake_;
  std::thread keeper_;  // evicts and rescans in the background, when there is a cap or a floor
};

}  // namespace kvtransfer
