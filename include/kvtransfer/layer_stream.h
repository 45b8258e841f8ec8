// LayerStream: per layer a count of what has arrived; the fence a forward pass waits on.
//
// Arrival is counted, not ordered: a layer is ready when `expected` arrivals of it came, from
// however many sources (split reads), queue pairs or chunks, in any order.
//
// Thread safety: any thread may call any method.
// Invariants:
//  1. ready(l) means: every byte that the arrivals of l stand for is visible to the caller
//     (arrive releases, ready and wait acquire).
//  2. A stream fails at most once; a failed stream never blocks a waiter again.
//  3. wait() allocates nothing and takes no lock; it sleeps on a futex until its deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kvtransfer/error.h"

namespace kvtransfer {

class Notifier;

enum class WaitResult : uint8_t { kReady, kFailed, kTimeout };

class LayerStream {
 public:
  // How many arrivals make a layer ready when that isn't known yet (set_expected follows).
  static constexpr uint32_t kUnknown = UINT32_MAX;

  // 0 expected arrivals: every layer is ready at once. Throws Error(kInvalidArgument) for no
  // layers. `events` is rung when a layer becomes ready or the stream fails, `published` on
  // publish().
  explicit LayerStream(uint32_t num_layers, uint32_t expected = 1,
                       std::shared_ptr<Notifier> events = nullptr,
                       std::shared_ptr<Notifier> published = nullptr);
  ~LayerStream();

  uint32_t num_layers() const noexcept { return static_cast<uint32_t>(arrived_.size()); }
  void set_expected(uint32_t expected) noexcept;

  // `count` more arrivals of a layer. Out-of-range layers are ignored (they may come from a peer).
  void arrive(uint32_t layer, uint32_t count = 1) noexcept;
  // The engine's side of an outgoing stream: layer's KV is complete, send it. An arrival that also
  // wakes the progress thread.
  void publish(uint32_t layer) noexcept;
  void fail(Outcome why) noexcept;

  bool ready(uint32_t layer) const noexcept;
  uint32_t arrived(uint32_t layer) const noexcept;
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  Outcome failure() const;

  // Until the layer is ready, the stream fails or the deadline (CLOCK_MONOTONIC ns) passes. A layer
  // that is ready stays so even if the stream fails later. REQUIRES: layer < num_layers().
  WaitResult wait(uint32_t layer, int64_t deadline_ns) noexcept;
  // Nanoseconds that waiters of this layer have spent asleep.
  uint64_t stall_ns(uint32_t layer) const noexcept;

 private:
  void changed() noexcept;

  struct Layer {
    std::atomic<uint32_t> arrived{0};  // release in arrive() pairs with acquire in ready()
    std::atomic<uint64_t> stall_ns{0};
  };
  std::vector<Layer> arrived_;
  std::atomic<uint32_t> expected_;
  std::atomic<uint32_t> version_{0};  // the futex word; grows with every change a waiter may await
  std::atomic<uint32_t> waiters_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;  // cold: guards failure_ only
  Outcome failure_;
  std::shared_ptr<Notifier> events_;
  std::shared_ptr<Notifier> published_;
};

}  // namespace kvtransfer
