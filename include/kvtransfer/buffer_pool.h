// BufferPool: the PE or DE buffer. Fixed-size slots of one MemoryRegion, handed out lock-free.
//
//   slot  | header page(s) | Full Block | padding to 4 KiB |
//
// The header pages let storage I/O move a whole block file in one aligned operation, without a
// bounce buffer.
//
// Thread safety: every method may be called from any thread at any time.
// Invariants:
//  1. acquire(n) gets n slots or none: two requests can't deadlock half-filled.
//  2. A slot has a reference count. acquire() sets 1; whoever starts an operation that can touch
//  the
//     slot retains it until that operation has completed or its queue was drained; the slot is free
//     again when the last reference is released.
//  3. A release of a free slot is refused and counted, never done.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "kvtransfer/memory_region.h"

namespace kvtransfer {

class BufferPool {
 public:
  static constexpr uint32_t kAlignment = 4096;

  // Slots of `header_bytes` + `payload_bytes`, rounded up to kAlignment.
  // Throws Error(kInvalidArgument) for no slots or unaligned headers.
  BufferPool(std::shared_ptr<MemoryRegion> region, uint32_t header_bytes, uint64_t payload_bytes);
  ~BufferPool();

  static uint64_t slot_bytes(uint32_t header_bytes, uint64_t payload_bytes) noexcept;

  // All of `slots` or nothing.
  bool acquire(std::span<uint32_t> slots) noexcept;
  // REQUIRES: the caller holds a reference to the slot.
  void retain(uint32_t slot) noexcept;
  // False if the slot was free (a bug of the caller; counted in bad_releases()).
  bool release(uint32_t slot) noexcept;

  uint32_t num_slots() const noexcept { return num_slots_; }
  uint32_t available() const noexcept;
  // The fewest slots that were ever free at once: how close the pool came to running out.
  uint32_t low_watermark() const noexcept { return low_.load(std::memory_order_relaxed); }
  uint64_t bad_releases() const noexcept { return bad_releases_.load(std::memory_order_relaxed); }

  uint64_t slot_bytes() const noexcept { return slot_bytes_; }
  uint32_t header_bytes() const noexcept { return header_bytes_; }
  // Byte offsets in the region. REQUIRES: slot < num_slots().
  uint64_t slot_offset(uint32_t slot) const noexcept { return slot * slot_bytes_; }
  uint64_t payload_offset(uint32_t slot) const noexcept {
    return slot * slot_bytes_ + header_bytes_;
  }
  uint8_t* slot_data(uint32_t slot) const noexcept { return region_->data() + slot_offset(slot); }
  const std::shared_ptr<MemoryRegion>& region() const noexcept { return region_; }

 private:
  struct State;

  std::shared_ptr<MemoryRegion> region_;
  uint32_t header_bytes_;
  uint64_t slot_bytes_;
  uint32_t num_slots_;
  std::unique_ptr<State> state_;
  std::atomic<uint32_t> low_;
  std::atomic<uint64_t> bad_releases_{0};
};

}  // namespace kvtransfer
