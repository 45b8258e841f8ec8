// IoSlots: the bookkeeping both IoQueue twins share. A fixed table of operations in flight; a tag
// (generation, slot) names one, so that a completion of an earlier life is recognised and dropped.
#pragma once

#include <errno.h>

#include <cstdint>
#include <vector>

#include "kvtransfer/io_queue.h"

namespace kvtransfer {

struct IoSlot {
  IoRequest request;
  uint64_t done = 0;  // bytes of a read or write that are through
  uint32_t generation = 0;
  bool busy = false;
};

class IoSlots {
 public:
  explicit IoSlots(uint32_t depth) : slots_(depth) {
    for (uint32_t i = depth; i-- > 0;) free_.push_back(i);
  }

  bool full() const noexcept { return free_.empty(); }
  uint32_t in_flight() const noexcept {
    return static_cast<uint32_t>(slots_.size() - free_.size());
  }
  uint32_t depth() const noexcept { return static_cast<uint32_t>(slots_.size()); }

  // REQUIRES: !full().
  uint32_t claim(const IoRequest& request) noexcept {
    const uint32_t index = free_.back();
    free_.pop_back();
    IoSlot& slot = slots_[index];
    slot.request = request;
    slot.done = 0;
    slot.busy = true;
    ++slot.generation;
    return index;
  }
  void release(uint32_t index) noexcept {
    slots_[index].busy = false;
    free_.push_back(index);  // capacity was reached at construction: never allocates
  }

  IoSlot& operator[](uint32_t index) noexcept { return slots_[index]; }
  uint64_t tag(uint32_t index) const noexcept {
    return uint64_t{slots_[index].generation} << 32 | index;
  }
  // The slot a tag names, or nullptr for a stale or foreign tag.
  IoSlot* find(uint64_t tag) noexcept {
    const auto index = static_cast<uint32_t>(tag);
    if (index >= slots_.size()) return nullptr;
    IoSlot& slot = slots_[index];
    return slot.busy && slot.generation == static_cast<uint32_t>(tag >> 32) ? &slot : nullptr;
  }

 private:
  std::vector<IoSlot> slots_;
  std::vector<uint32_t> free_;
};

// What to do with a raw result: `finished` with `result`, or go on with the tail or retry.
struct IoStep {
  bool finished;
  int64_t result;
};

// Applies invariant 1 of IoQueue to one raw kernel result.
inline IoStep advance(IoSlot& slot, int64_t raw) noexcept {
  const IoOp op = slot.request.op;
  if (raw == -EINTR || raw == -EAGAIN) return {false, 0};
  if ((op != IoOp::kRead && op != IoOp::kWrite) || raw < 0) return {true, raw};
  if (raw == 0 && slot.done < slot.request.length) {
    return {true, op == IoOp::kRead ? -ENODATA : -EIO};
  }
  slot.done += static_cast<uint64_t>(raw);
  return {slot.done >= slot.request.length, static_cast<int64_t>(slot.done)};
}

// Linux moves at most 2 GiB - 4 KiB per call; longer operations go on with their tail.
constexpr uint64_t kMaxTransferBytes = (uint64_t{1} << 31) - 4096;

}  // namespace kvtransfer
