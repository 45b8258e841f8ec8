#include "kvtransfer/buffer_pool.h"

#include <string>
#include <vector>

#include "kvtransfer/error.h"
#include "memory/free_list.h"

namespace kvtransfer {

struct BufferPool::State {
  explicit State(uint32_t num_slots) : free_list(num_slots), references(num_slots) {}

  FreeList<> free_list;
  std::vector<std::atomic<uint32_t>> references;
};

uint64_t BufferPool::slot_bytes(uint32_t header_bytes, uint64_t payload_bytes) noexcept {
  return header_bytes + (payload_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

BufferPool::BufferPool(std::shared_ptr<MemoryRegion> region, uint32_t header_bytes,
                       uint64_t payload_bytes)
    : region_(std::move(region)),
      header_bytes_(header_bytes),
      slot_bytes_(slot_bytes(header_bytes, payload_bytes)) {
  if (!region_ || payload_bytes == 0 || header_bytes % kAlignment != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "BufferPool: needs a region, a payload and header_bytes that are a multiple of " +
                    std::to_string(kAlignment));
  }
  const uint64_t slots = region_->bytes() / slot_bytes_;
  if (slots == 0 || slots >= UINT32_MAX) {
    throw Error(ErrorCode::kInvalidArgument,
                "BufferPool: a region of " + std::to_string(region_->bytes()) +
                    " bytes holds no slot of " + std::to_string(slot_bytes_) + " bytes");
  }
  num_slots_ = static_cast<uint32_t>(slots);
  state_ = std::make_unique<State>(num_slots_);
  low_.store(num_slots_, std::memory_order_relaxed);
}

BufferPool::~BufferPool() = default;

bool BufferPool::acquire(std::span<uint32_t> slots) noexcept {
  if (!state_->free_list.take(slots)) return false;
  for (const uint32_t slot : slots) {
    state_->references[slot].store(1, std::memory_order_relaxed);
  }
  const uint32_t now = state_->free_list.available();
  uint32_t low = low_.load(std::memory_order_relaxed);
  while (now < low && !low_.compare_exchange_weak(low, now, std::memory_order_relaxed)) {
  }
  return true;
}

void BufferPool::retain(uint32_t slot) noexcept {
  state_->references[slot].fetch_add(1, std::memory_order_relaxed);
}

bool BufferPool::release(uint32_t slot) noexcept {
  if (slot >= num_slots_) {
    bad_releases_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  uint32_t seen = state_->references[slot].load(std::memory_order_relaxed);
  do {
    if (seen == 0) {
      bad_releases_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    // acq_rel: the last releaser sees what every earlier holder did to the slot's bytes.
  } while (!state_->references[slot].compare_exchange_weak(
      seen, seen - 1, std::memory_order_acq_rel, std::memory_order_relaxed));
  if (seen == 1) state_->free_list.give(slot);
  return true;
}

uint32_t BufferPool::available() const noexcept {
  return state_->free_list.available();
}

}  // namespace kvtransfer
