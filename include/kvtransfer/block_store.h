// BlockStore: Full Blocks as files of one directory, found by chained keys.
//
// The directory is the truth and may be shared by any number of processes and hosts; a process's
// catalog is a cache of it. docs/block_format.md draws the file and says what is promised after a
// crash.
//
// Thread safety: all methods may be called from any thread (the catalog has one lock, held for
// table operations only, never across a system call on a block). Invariants:
//  1. A block is visible under its final name only when complete (temporary name, then rename).
//  2. What get() reports as loaded passed the header check (format, namespace, key, parent, layout)
//     and the checksum of each of its layers; anything else is a miss and the prefix before it is
//     kept. A corrupt file is removed so that its recomputed block can take its place.
//  3. The first published block of a key wins; a later put of the same key changes nothing.
//  4. Eviction takes leaves of the key trie only, least recently used first, never a pinned block.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

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
  bool verify_checksums = true;
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
};

class Catalog;

class BlockStore {
 public:
  // Opens or creates `root`. Throws Error(kMismatch) when the directory was made for another format
  // version, namespace or layout (it says which), Error(kIo) when it can't be used.
  BlockStore(const std::string& root, const BlockKey& name_space, const BlockLayout& layout,
             const StoreOptions& options = {});
  ~BlockStore();

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

  // Evicts until the cap holds with 5 % to spare; returns the blocks removed. One process at a time
  // does it (a lock file); a rescan first makes the accounting honest.
  uint64_t evict();
  // Re-reads the directory: blocks, bytes, stale temporaries.
  void rescan();

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
    return BufferPool::slot_bytes(header_bytes_, layout_.full_block_bytes());
  }
  // False when the file system refuses O_DIRECT (then reads go through the page cache).
  bool direct_io() const noexcept { return direct_io_; }
  StoreStats stats() const;

  std::string path_of(const BlockId& id) const;
  std::string directory_of(const BlockId& id) const;

  // --- for the asynchronous reader and writer (src/store/store_io.h) ---
  // Reserves room for one block, evicting if need be. False: full (the cap can't be met, or no
  // space on the device); says so once on standard error. Each true is paid back by end_writes().
  bool admit_write() noexcept;
  void end_writes(uint32_t admitted) noexcept;
  void published(const BlockId& id, bool duplicate) noexcept;
  void write_failed(int error) noexcept;
  void read_failed(const BlockId& id, bool corrupt) noexcept;

 private:
  void open_root();
  void check_manifest();
  bool exists(const BlockId& id) noexcept;
  bool space_left() noexcept;
  bool over_cap() const noexcept;
  uint64_t remove_leaves(uint64_t target_bytes);

  std::string root_;
  BlockKey name_space_;
  BlockLayout layout_;
  StoreOptions options_;
  uint32_t header_bytes_;
  bool direct_io_ = true;

  mutable std::mutex mutex_;  // guards catalog_, stats_ and writing_
  std::unique_ptr<Catalog> catalog_;
  StoreStats stats_;
  uint64_t writing_ = 0;  // admitted and not ended
};

}  // namespace kvtransfer
