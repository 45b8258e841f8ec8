// Catalog: which blocks are believed to be in the directory, as a trie by parent key.
//
// One array of nodes and one open-addressing table of indices into it: a lookup touches two cache
// lines, a block costs 56 bytes and its share of the table (docs/block_format.md has the figure). A
// parent that is not known itself but has known children is a node that is not `present`; blocks
// below one are orphans: no lookup can reach them, so they are evicted first.
//
// Thread safety: const methods and touch() may run together; the others need the catalog for
// themselves (BlockStore's reader-writer lock). Invariants:
//  1. A node's `children` counts its present children. A node that is neither present nor a parent
//     of anything is free, but for node 0, the root.
//  2. Every node that is not free is in the table, and nothing else is.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvtransfer/block_store.h"

namespace kvtransfer {

class Catalog {
 public:
  explicit Catalog(const BlockKey& root);

  bool contains(const BlockKey& key) const noexcept { return find_present(key) != nullptr; }
  // Marks a block as used now. False if it isn't known.
  bool touch(const BlockKey& key) const noexcept;
  // `last_use` orders blocks that this process has not used (file times); 0 means now.
  void insert(const BlockId& id, uint64_t last_use = 0);
  bool erase(const BlockKey& key) noexcept;
  void pin(const BlockKey& key) noexcept;
  void unpin(const BlockKey& key) noexcept;

  // The blocks to remove, in order, so that at most `keep` blocks stay: least recently used leaves,
  // then the parents that become leaves by it.
  std::vector<BlockId> plan_eviction(uint64_t keep) const;

  uint64_t size() const noexcept { return size_; }

  // A scan of the directory replaces what is known, in steps between which others may use the
  // catalog: begin_scan() before the directory is read, merge() with all that was found, then
  // sweep() until it returns true. Blocks inserted meanwhile stay, use times and pins are kept.
  void begin_scan() noexcept { ++scan_; }
  void reserve(size_t num_blocks);
  void merge(std::span<const std::pair<BlockId, uint64_t>> found);
  bool sweep(uint32_t max_nodes) noexcept;
  // Of the heap.
  uint64_t memory_bytes() const noexcept {
    return nodes_.capacity() * sizeof(Node) + table_.capacity() * sizeof(Slot);
  }

 private:
  using Index = uint32_t;
  static constexpr Index kNone = UINT32_MAX;
  static constexpr Index kRoot = 0;

  struct Node {
    BlockKey key;
    alignas(8) mutable uint64_t last_use = 0;  // through atomic_ref, where readers may run
    Index parent = kNone;                      // next free node, in one that is free
    uint32_t children = 0;
    uint32_t pins = 0;
    bool present = false;
    uint8_t scan = 0;  // the last one that saw it, or during which it came
  };
  static_assert(sizeof(Node) == 56);
  struct Slot {
    uint32_t tag = 0;  // bits of the key that don't choose the slot: spares most looks at nodes
    Index index = kNone;
  };

  // Use times of this process lie above all file times (nanoseconds since 1970 < 2^62).
  static constexpr uint64_t kFirstUse = uint64_t{1} << 62;

  // Per node, whether all of its ancestors up to the root are present.
  std::vector<bool> find_reachable() const;
  Index find(const BlockKey& key) const noexcept;
  Node* find_present(const BlockKey& key) noexcept;
  const Node* find_present(const BlockKey& key) const noexcept {
    return const_cast<Catalog*>(this)->find_present(key);
  }
  void erase_node(Index index) noexcept;
  Index find_or_add(const BlockKey& key);
  Node& add(const BlockId& id);
  void release_if_unused(Index index) noexcept;
  size_t slot_of(Index index) const noexcept;
  void remove_slot(size_t hole) noexcept;
  void grow(size_t slots);

  std::vector<Node> nodes_;
  std::vector<Slot> table_;  // a power of two, at most 3/4 full
  Index free_ = kNone;
  uint64_t used_ = 0;                               // nodes in the table
  uint64_t size_ = 0;                               // present ones
  mutable std::atomic<uint64_t> clock_{kFirstUse};  // a plain counter
  uint8_t scan_ = 0;
  Index swept_ = 0;  // nodes before it have been swept
};

}  // namespace kvtransfer
