// FreeList: a lock-free pool of the integers [0, n), taken n at a time or not at all.
//
// Two atomics carry it. `available_` is a reservation count: take(n) first lowers it by n or fails,
// so that a request never holds half of what it needs. `head_` is a Treiber stack of indices whose
// 32-bit tag changes on every push and pop, which defeats ABA.
//
// Invariants:
//  1. The stack holds at least `available_` + (reserved but not yet popped) indices: give() pushes
//     before it raises the count. So a pop after a reservation always finds an index.
//  2. Every index is either in the stack or with exactly one taker.
//  3. The tag of `head_` only grows (mod 2^32).
//
// `Atomic` is std::atomic; the tests substitute one that yields to a seeded scheduler at every
// operation, to walk through interleavings (after folly's DeterministicSchedule).
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtransfer {

template <template <class> class Atomic = std::atomic>
class FreeList {
 public:
  explicit FreeList(uint32_t size) : next_(size), head_(pack(0, kEnd)), available_(0) {
    for (uint32_t i = size; i-- > 0;) push(i);
    available_.store(size, std::memory_order_release);
  }

  // Fills `out` entirely and returns true, or takes nothing and returns false. Any thread.
  bool take(std::span<uint32_t> out) noexcept {
    const auto wanted = static_cast<uint32_t>(out.size());
    uint32_t seen = available_.load(std::memory_order_relaxed);
    do {
      if (seen < wanted) return false;
      // acquire pairs with the release in give(): the pushed indices are visible.
    } while (!available_.compare_exchange_weak(seen, seen - wanted, std::memory_order_acquire,
                                               std::memory_order_relaxed));
    for (uint32_t& index : out) index = pop();
    return true;
  }

  // Any thread. REQUIRES: `index` was taken and not given back since.
  void give(uint32_t index) noexcept {
    push(index);
    available_.fetch_add(1, std::memory_order_release);  // pairs with take()
  }

  uint32_t available() const noexcept { return available_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kEnd = UINT32_MAX;
  static constexpr uint64_t pack(uint32_t tag, uint32_t index) {
    return uint64_t{tag} << 32 | index;
  }
  static constexpr uint32_t index_of(uint64_t head) { return static_cast<uint32_t>(head); }
  static constexpr uint32_t tag_of(uint64_t head) { return static_cast<uint32_t>(head >> 32); }

  void push(uint32_t index) noexcept {
    uint64_t seen = head_.load(std::memory_order_relaxed);
    do {
      next_[index].store(index_of(seen), std::memory_order_relaxed);
      // release pairs with the acquire in pop(): next_[index] is visible to who pops it.
    } while (!head_.compare_exchange_weak(seen, pack(tag_of(seen) + 1, index),
                                          std::memory_order_release, std::memory_order_relaxed));
  }

  uint32_t pop() noexcept {
    uint64_t seen = head_.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t index = index_of(seen);
      // A stale `next` is harmless: the tag has changed then and the exchange fails.
      const uint32_t next = next_[index].load(std::memory_order_relaxed);
      if (head_.compare_exchange_weak(seen, pack(tag_of(seen) + 1, next), std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
        return index;
      }
    }
  }

  std::vector<Atomic<uint32_t>> next_;
  alignas(64) Atomic<uint64_t> head_;
  alignas(64) Atomic<uint32_t> available_;
};

}  // namespace kvtransfer
