#include "store/memory_tier.h"

#include <cstring>

namespace kvtransfer {

namespace {

// Misses remembered, as a multiple of the tier's size.
constexpr size_t kGhosts = 4;

}  // namespace

size_t MemoryTier::Hash::operator()(const BlockKey& key) const noexcept {
  size_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);
  return hash;
}

MemoryTier::MemoryTier(uint32_t num_blocks, uint64_t slot_bytes)
    : slot_bytes_(slot_bytes),
      region_(std::make_unique<MemoryRegion>(num_blocks * slot_bytes, RegionKind::kAnonymous)),
      table_(num_blocks) {}

std::optional<uint32_t> MemoryTier::pin(const BlockKey& key) {
  const auto found = slots_.find(key);
  if (found != slots_.end()) {
    hits_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = table_[found->second];
    ++slot.pins;
    order_.splice(order_.end(), order_, slot.place);
    return found->second;
  }
  misses_.fetch_add(1, std::memory_order_relaxed);
  if (++ghosts_[key] == 1) {
    ghost_order_.push_back(key);
    if (ghost_order_.size() > kGhosts * table_.size()) {
      ghosts_.erase(ghost_order_.front());
      ghost_order_.pop_front();
    }
  }
  return std::nullopt;
}

void MemoryTier::unpin(uint32_t slot) noexcept {
  --table_[slot].pins;
}

// Never used so far, or the least recently used one that nobody reads.
std::optional<uint32_t> MemoryTier::free_slot() {
  if (order_.size() < table_.size()) return static_cast<uint32_t>(order_.size());
  for (auto it = order_.begin(); it != order_.end(); ++it) {
    if (table_[*it].pins > 0) continue;
    const uint32_t slot = *it;
    slots_.erase(table_[slot].key);
    order_.erase(it);
    evicted_.fetch_add(1, std::memory_order_relaxed);
    return slot;
  }
  return std::nullopt;
}

void MemoryTier::offer(const BlockKey& key, const uint8_t* image, bool wanted) {
  const auto ghost = ghosts_.find(key);
  const bool reused = ghost != ghosts_.end() && ghost->second > 1;
  if (slots_.contains(key) || !(wanted || reused)) return;
  const auto slot = free_slot();
  if (!slot) return;
  std::memcpy(region_->data() + *slot * slot_bytes_, image, slot_bytes_);
  table_[*slot].key = key;
  table_[*slot].place = order_.insert(order_.end(), *slot);
  slots_[key] = *slot;
  admitted_.fetch_add(1, std::memory_order_relaxed);
  blocks_.store(slots_.size(), std::memory_order_relaxed);
}

MemoryTierStats MemoryTier::stats() const noexcept {
  return {table_.size(),
          blocks_.load(std::memory_order_relaxed),
          hits_.load(std::memory_order_relaxed),
          misses_.load(std::memory_order_relaxed),
          admitted_.load(std::memory_order_relaxed),
          evicted_.load(std::memory_order_relaxed)};
}

}  // namespace kvtransfer
