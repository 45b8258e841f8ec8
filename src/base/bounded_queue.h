// BoundedQueue: a lock-free multi-producer multi-consumer ring (after D. Vyukov).
//
// Each cell's sequence number says whose turn it is: `position` for a producer, `position + 1` for
// a consumer. Any thread may push and pop; neither blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

namespace kvtransfer {

template <class T>
class BoundedQueue {
 public:
  // REQUIRES: capacity is a power of two.
  explicit BoundedQueue(size_t capacity) : mask_(capacity - 1), cells_(capacity) {
    for (size_t i = 0; i < capacity; ++i) cells_[i].sequence.store(i, std::memory_order_relaxed);
  }

  // False when full; `value` is untouched then.
  bool push(T& value) noexcept {
    size_t at = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const size_t sequence = cell.sequence.load(std::memory_order_acquire);  // pairs with pop()
      if (sequence == at) {
        if (tail_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
          cell.value = std::move(value);
          cell.sequence.store(at + 1, std::memory_order_release);  // pairs with pop()
          return true;
        }
      } else if (sequence < at) {
        return false;
      } else {
        at = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  bool pop(T& value) noexcept {
    size_t at = head_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[at & mask_];
      const size_t sequence = cell.sequence.load(std::memory_order_acquire);  // pairs with push()
      if (sequence == at + 1) {
        if (head_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
          value = std::move(cell.value);
          cell.sequence.store(at + mask_ + 1, std::memory_order_release);  // pairs with push()
          return true;
        }
      } else if (sequence < at + 1) {
        return false;
      } else {
        at = head_.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  struct Cell {
    std::atomic<size_t> sequence{0};
    T value{};
  };
  const size_t mask_;
  std::vector<Cell> cells_;
  alignas(64) std::atomic<size_t> tail_{0};
  alignas(64) std::atomic<size_t> head_{0};
};

}  // namespace kvtransfer
