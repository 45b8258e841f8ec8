// Catalog: which blocks are believed to be in the directory, as a trie by parent key.
//
// Not thread-safe (BlockStore's lock guards it). A block whose parent is unknown is an orphan: no
// lookup can reach it, so it is evicted first.
#pragma once

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "kvtransfer/block_store.h"

namespace kvtransfer {

class Catalog {
 public:
  explicit Catalog(const BlockKey& root) : root_(root) {}

  bool contains(const BlockKey& key) const noexcept { return entries_.contains(key); }
  // Marks a block as used now. False if it isn't known.
  bool touch(const BlockKey& key) noexcept;
  // `last_use` orders blocks that this process has not used (file times); 0 means now.
  void insert(const BlockId& id, uint64_t last_use = 0);
  bool erase(const BlockKey& key) noexcept;
  void pin(const BlockKey& key) noexcept;
  void unpin(const BlockKey& key) noexcept;

  // The blocks to remove, in order, so that at most `keep` blocks stay: least recently used leaves,
  // then the parents that become leaves by it.
  std::vector<BlockId> plan_eviction(uint64_t keep) const;

  uint64_t size() const noexcept { return entries_.size(); }
  // Replaces what is known by what a scan found, keeping use times and pins.
  void replace(const std::vector<std::pair<BlockId, uint64_t>>& found);

 private:
  struct KeyHash {
    size_t operator()(const BlockKey& key) const noexcept {
      size_t hash;  // keys are digests: any 8 bytes of them are a good hash
      std::memcpy(&hash, key.data(), sizeof hash);
      return hash;
    }
  };
  struct Entry {
    BlockKey parent;
    uint64_t last_use = 0;
    uint32_t pins = 0;
  };

  // Use times of this process lie above all file times (nanoseconds since 1970 < 2^62).
  static constexpr uint64_t kFirstUse = uint64_t{1} << 62;

  bool reachable(const Entry& entry) const noexcept {
    return entry.parent == root_ || entries_.contains(entry.parent);
  }

  BlockKey root_;
  std::unordered_map<BlockKey, Entry, KeyHash> entries_;
  // Known children per parent key, whether or not the parent itself is known (a scan has no order).
  std::unordered_map<BlockKey, uint32_t, KeyHash> children_;
  uint64_t clock_ = kFirstUse;
};

}  // namespace kvtransfer
