#include "kvtransfer/layer_stream.h"

#include <string>

#include "base/clock.h"
#include "base/futex.h"
#include "base/notifier.h"
#include "kvtransfer/block_layout.h"

namespace kvtransfer {

namespace {
uint32_t checked_layers(uint32_t num_layers) {
  if (num_layers == 0 || num_layers > BlockLayout::kMaxLayers) {
    throw Error(ErrorCode::kInvalidArgument, "LayerStream: num_layers must be 1.." +
                                                 std::to_string(BlockLayout::kMaxLayers) +
                                                 ", got " + std::to_string(num_layers));
  }
  return num_layers;
}
}  // namespace

LayerStream::LayerStream(uint32_t num_layers, uint32_t expected, std::shared_ptr<Notifier> events,
                         std::shared_ptr<Notifier> published)
    : arrived_(checked_layers(num_layers)),
      expected_(expected),
      events_(std::move(events)),
      published_(std::move(published)) {}

LayerStream::~LayerStream() = default;

void LayerStream::changed() noexcept {
  // seq_cst here and in wait(): either the waiter sees the new version or we see the waiter.
  version_.fetch_add(1, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) != 0) futex_wake_all(version_);
  if (events_) events_->ring();
}

void LayerStream::set_expected(uint32_t expected) noexcept {
  expected_.store(expected, std::memory_order_release);
  changed();
}

void LayerStream::arrive(uint32_t layer, uint32_t count) noexcept {
  if (layer >= num_layers()) return;
  arrived_[layer].arrived.fetch_add(count, std::memory_order_acq_rel);
  if (ready(layer)) changed();
}

void LayerStream::publish(uint32_t layer) noexcept {
  arrive(layer);
  if (published_) published_->ring();
}

void LayerStream::fail(Outcome why) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    failure_ = std::move(why);
    failed_.store(true, std::memory_order_release);
  }
  changed();
  if (published_) published_->ring();
}

bool LayerStream::ready(uint32_t layer) const noexcept {
  return arrived(layer) >= expected_.load(std::memory_order_acquire);
}

uint32_t LayerStream::arrived(uint32_t layer) const noexcept {
  return arrived_[layer].arrived.load(std::memory_order_acquire);
}

Outcome LayerStream::failure() const {
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

WaitResult LayerStream::wait(uint32_t layer, int64_t deadline_ns) noexcept {
  if (ready(layer)) return WaitResult::kReady;
  const int64_t begin = now_ns();
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  WaitResult result = WaitResult::kTimeout;
  for (;;) {
    const uint32_t seen = version_.load(std::memory_order_seq_cst);
    if (ready(layer)) {
      result = WaitResult::kReady;
      break;
    }
    if (failed()) {
      result = WaitResult::kFailed;
      break;
    }
    if (now_ns() >= deadline_ns) break;
    futex_wait(version_, seen, deadline_ns);
  }
  waiters_.fetch_sub(1, std::memory_order_relaxed);
  arrived_[layer].stall_ns.fetch_add(static_cast<uint64_t>(now_ns() - begin),
                                     std::memory_order_relaxed);
  return result;
}

uint64_t LayerStream::stall_ns(uint32_t layer) const noexcept {
  return arrived_[layer].stall_ns.load(std::memory_order_relaxed);
}

}  // namespace kvtransfer
