#include "store/catalog.h"

#include <queue>

namespace kvtransfer {

bool Catalog::touch(const BlockKey& key) noexcept {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  it->second.last_use = ++clock_;
  return true;
}

void Catalog::insert(const BlockId& id, uint64_t last_use) {
  const auto [it, added] = entries_.try_emplace(id.key);
  it->second.last_use = last_use != 0 ? last_use : ++clock_;
  if (!added) return;
  it->second.parent = id.parent;
  ++children_[id.parent];
}

bool Catalog::erase(const BlockKey& key) noexcept {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return false;
  const auto siblings = children_.find(it->second.parent);
  if (--siblings->second == 0) children_.erase(siblings);
  entries_.erase(it);
  return true;
}

void Catalog::pin(const BlockKey& key) noexcept {
  const auto it = entries_.find(key);
  if (it != entries_.end()) ++it->second.pins;
}

void Catalog::unpin(const BlockKey& key) noexcept {
  const auto it = entries_.find(key);
  if (it != entries_.end() && it->second.pins > 0) --it->second.pins;
}

std::vector<BlockId> Catalog::plan_eviction(uint64_t keep) const {
  using Candidate = std::pair<uint64_t, const BlockKey*>;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> leaves;
  auto children = children_;
  const auto offer = [&](const BlockKey& key, const Entry& entry) {
    if (entry.pins == 0) leaves.emplace(reachable(entry) ? entry.last_use : 0, &key);
  };
  for (const auto& [key, entry] : entries_) {
    if (!children.contains(key)) offer(key, entry);
  }
  std::vector<BlockId> plan;
  uint64_t left = entries_.size();
  while (left > keep && !leaves.empty()) {
    const BlockKey& key = *leaves.top().second;
    leaves.pop();
    const Entry& entry = entries_.at(key);
    plan.push_back({key, entry.parent});
    --left;
    const auto parent = entries_.find(entry.parent);
    if (--children[entry.parent] == 0 && parent != entries_.end()) {
      offer(parent->first, parent->second);
    }
  }
  return plan;
}

void Catalog::replace(const std::vector<std::pair<BlockId, uint64_t>>& found) {
  std::unordered_map<BlockKey, Entry, KeyHash> old;
  old.swap(entries_);
  children_.clear();
  for (const auto& [id, file_time] : found) {
    Entry entry;
    entry.parent = id.parent;
    entry.last_use = file_time;
    const auto it = old.find(id.key);
    if (it != old.end()) {
      entry.pins = it->second.pins;
      entry.last_use = std::max(entry.last_use, it->second.last_use);
    }
    if (entries_.emplace(id.key, entry).second) ++children_[id.parent];
  }
}

}  // namespace kvtransfer
