// MemoryTier: hot blocks kept in host memory, in front of the store. Off by default; the paper runs
// without.
//
// A block comes in when it has been read twice within the last few times the tier's size (one scan
// of cold blocks doesn't drive the hot ones out), or when it was prefetched; the least recently
// used goes. What is in it has been verified.
//
// Thread safety: none but stats(); belongs to the IoQueue's owner thread. Invariant: a pinned slot
// is neither evicted nor overwritten.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>

#include "kvtransfer/block_store.h"
#include "kvtransfer/memory_region.h"

namespace kvtransfer {

class MemoryTier {
 public:
  MemoryTier(uint32_t num_blocks, uint64_t slot_bytes);

  // The slot that holds a block, pinned until unpin(); also counts the hit or miss and remembers
  // the miss.
  std::optional<uint32_t> pin(const BlockKey& key);
  void unpin(uint32_t slot) noexcept;
  const uint8_t* data(uint32_t slot) const noexcept { return region_->data() + slot * slot_bytes_; }

  bool contains(const BlockKey& key) const { return slots_.contains(key); }
  // Copies a verified block in if it is worth it, or `wanted` anyway.
  void offer(const BlockKey& key, const uint8_t* image, bool wanted);

  MemoryTierStats stats() const noexcept;

 private:
  struct Hash {
    size_t operator()(const BlockKey& key) const noexcept;
  };
  struct Slot {
    BlockKey key;
    uint32_t pins = 0;
    std::list<uint32_t>::iterator place;  // in order_
  };

  std::optional<uint32_t> free_slot();

  const uint64_t slot_bytes_;
  std::unique_ptr<MemoryRegion> region_;
  std::vector<Slot> table_;
  std::list<uint32_t> order_;  // used slots, least recently used first
  std::unordered_map<BlockKey, uint32_t, Hash> slots_;
  std::unordered_map<BlockKey, uint32_t, Hash> ghosts_;  // misses not long ago, and how many
  std::deque<BlockKey> ghost_order_;
  std::atomic<uint64_t> blocks_{0}, hits_{0}, misses_{0}, admitted_{0}, evicted_{0};  // counters
};

}  // namespace kvtransfer
