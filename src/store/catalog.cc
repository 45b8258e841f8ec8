#include "store/catalog.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <unordered_map>

namespace kvtransfer {

namespace {

// Keys are digests: any bits of them are a good hash.
uint64_t hash_of(const BlockKey& key) noexcept {
  uint64_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);
  return hash;
}
uint32_t tag_of(const BlockKey& key) noexcept {
  uint32_t tag;
  std::memcpy(&tag, key.data() + sizeof(uint64_t), sizeof tag);
  return tag;
}

constexpr size_t kFirstSlots = 64;

}  // namespace

Catalog::Catalog(const BlockKey& root) : table_(kFirstSlots) {
  find_or_add(root);  // node 0
}

Catalog::Index Catalog::find(const BlockKey& key) const noexcept {
  const size_t mask = table_.size() - 1;
  const uint32_t tag = tag_of(key);
  for (size_t at = hash_of(key) & mask; table_[at].index != kNone; at = (at + 1) & mask) {
    if (table_[at].tag == tag && nodes_[table_[at].index].key == key) return table_[at].index;
  }
  return kNone;
}

Catalog::Node* Catalog::find_present(const BlockKey& key) noexcept {
  const Index index = find(key);
  return index != kNone && nodes_[index].present ? &nodes_[index] : nullptr;
}

Catalog::Index Catalog::find_or_add(const BlockKey& key) {
  const Index known = find(key);
  if (known != kNone) return known;
  if ((used_ + 1) * 4 > table_.size() * 3) grow(table_.size() * 2);
  Index index = free_;
  if (index != kNone) {
    free_ = nodes_[index].parent;
    nodes_[index] = Node{};
  } else {
    index = static_cast<Index>(nodes_.size());
    nodes_.emplace_back();
  }
  nodes_[index].key = key;
  const size_t mask = table_.size() - 1;
  size_t at = hash_of(key) & mask;
  while (table_[at].index != kNone) at = (at + 1) & mask;
  table_[at] = {tag_of(key), index};
  ++used_;
  return index;
}

void Catalog::grow(size_t slots) {
  std::vector<Slot> old(slots);
  old.swap(table_);
  for (const Slot& slot : old) {
    if (slot.index == kNone) continue;
    size_t at = hash_of(nodes_[slot.index].key) & (slots - 1);
    while (table_[at].index != kNone) at = (at + 1) & (slots - 1);
    table_[at] = slot;
  }
}

size_t Catalog::slot_of(Index index) const noexcept {
  const size_t mask = table_.size() - 1;
  size_t at = hash_of(nodes_[index].key) & mask;
  while (table_[at].index != index) at = (at + 1) & mask;
  return at;
}

// Moves later ones of the run into the hole, so that no search ends before its key.
void Catalog::remove_slot(size_t hole) noexcept {
  const size_t mask = table_.size() - 1;
  for (size_t at = (hole + 1) & mask; table_[at].index != kNone; at = (at + 1) & mask) {
    const size_t home = hash_of(nodes_[table_[at].index].key) & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue;  // the hole lies before its home
    table_[hole] = table_[at];
    hole = at;
  }
  table_[hole] = {};
}

void Catalog::release_if_unused(Index index) noexcept {
  Node& node = nodes_[index];
  if (index == kRoot || node.present || node.children > 0) return;
  remove_slot(slot_of(index));
  --used_;
  node.parent = free_;
  free_ = index;
}

Catalog::Node& Catalog::add(const BlockId& id) {
  const Index index = find_or_add(id.key);
  if (!nodes_[index].present) {
    const Index parent = find_or_add(id.parent);
    nodes_[index].present = true;
    nodes_[index].parent = parent;
    ++nodes_[parent].children;
    ++size_;
  }
  nodes_[index].scan = scan_;
  return nodes_[index];
}

void Catalog::insert(const BlockId& id, uint64_t last_use) {
  if (id.key == id.parent) return;  // only a forged name says so
  add(id).last_use = last_use != 0 ? last_use : clock_.fetch_add(1, std::memory_order_relaxed);
}

bool Catalog::touch(const BlockKey& key) const noexcept {
  const Node* node = find_present(key);
  if (node == nullptr) return false;
  const uint64_t now = clock_.fetch_add(1, std::memory_order_relaxed);
  std::atomic_ref(node->last_use).store(now, std::memory_order_relaxed);
  return true;
}

bool Catalog::erase(const BlockKey& key) noexcept {
  const Index index = find(key);
  if (index == kNone || !nodes_[index].present) return false;
  erase_node(index);
  return true;
}

void Catalog::erase_node(Index index) noexcept {
  Node& node = nodes_[index];
  const Index parent = node.parent;
  node.present = false;
  node.pins = 0;
  node.parent = kNone;
  --size_;
  --nodes_[parent].children;
  release_if_unused(index);
  release_if_unused(parent);
}

void Catalog::pin(const BlockKey& key) noexcept {
  Node* node = find_present(key);
  if (node != nullptr) ++node->pins;
}

void Catalog::unpin(const BlockKey& key) noexcept {
  Node* node = find_present(key);
  if (node != nullptr && node->pins > 0) --node->pins;
}

std::vector<bool> Catalog::find_reachable() const {
  std::vector<bool> reachable(nodes_.size()), known(nodes_.size());
  std::vector<Index> path;
  for (Index start = 0; start < nodes_.size(); ++start) {
    if (!nodes_[start].present) continue;
    Index at = start;
    while (at != kRoot && nodes_[at].present && !known[at]) {
      known[at] = true;  // also ends a forged cycle: its blocks stay unreachable
      path.push_back(at);
      at = nodes_[at].parent;
    }
    const bool good = at == kRoot || (nodes_[at].present && reachable[at]);
    for (const Index index : path) reachable[index] = good;
    path.clear();
  }
  return reachable;
}

std::vector<BlockId> Catalog::plan_eviction(uint64_t keep) const {
  std::vector<BlockId> plan;
  if (size_ <= keep) return plan;
  using Candidate = std::pair<uint64_t, Index>;
  std::vector<Candidate> found;
  const std::vector<bool> reachable = find_reachable();
  const auto candidate = [&](Index index) {
    const std::atomic_ref last_use(nodes_[index].last_use);
    return Candidate{reachable[index] ? last_use.load(std::memory_order_relaxed) : 0, index};
  };
  for (Index index = 0; index < nodes_.size(); ++index) {
    const Node& node = nodes_[index];
    if (node.present && node.children == 0 && node.pins == 0) found.push_back(candidate(index));
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> leaves(std::greater<>(),
                                                                                std::move(found));
  std::unordered_map<Index, uint32_t> removed;  // children, per parent
  while (size_ - plan.size() > keep && !leaves.empty()) {
    const Node& node = nodes_[leaves.top().second];
    leaves.pop();
    const Node& parent = nodes_[node.parent];
    plan.push_back({node.key, parent.key});
    const bool last_child = ++removed[node.parent] == parent.children;
    if (last_child && parent.present && parent.pins == 0) leaves.push(candidate(node.parent));
  }
  return plan;
}

void Catalog::reserve(size_t num_blocks) {
  size_t slots = table_.size();
  while ((num_blocks + 2) * 4 > slots * 3) slots *= 2;
  if (slots != table_.size()) grow(slots);
  if (num_blocks >= nodes_.capacity()) nodes_.reserve(num_blocks + num_blocks / 8 + 1);
}

void Catalog::merge(std::span<const std::pair<BlockId, uint64_t>> found) {
  for (const auto& [id, file_time] : found) {
    if (id.key == id.parent) continue;
    Node& node = add(id);
    node.last_use = std::max(node.last_use, file_time);
  }
}

bool Catalog::sweep(uint32_t max_nodes) noexcept {
  const auto end = static_cast<Index>(std::min<size_t>(nodes_.size(), size_t{swept_} + max_nodes));
  for (; swept_ < end; ++swept_) {
    if (nodes_[swept_].present && nodes_[swept_].scan != scan_) erase_node(swept_);
  }
  const bool done = swept_ >= nodes_.size();
  if (done) swept_ = 0;
  return done;
}

}  // namespace kvtransfer
