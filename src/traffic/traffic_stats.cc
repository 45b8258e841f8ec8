#include "traffic/traffic_stats.h"

#include <utility>

namespace kvtransfer {

std::string_view traffic_kind_name(TrafficKind kind) noexcept {
  static constexpr std::string_view kNames[kNumTrafficKinds] = {
      "storage_read", "storage_write", "device_copy", "network_read", "network_write"};
  return kNames[static_cast<size_t>(kind)];
}

void TrafficStats::record(const TraceEvent& event) noexcept {
  Cell& counters = cell(static_cast<TrafficKind>(event.kind));
  counters.operations.fetch_add(1, std::memory_order_relaxed);
  counters.bytes.fetch_add(event.bytes, std::memory_order_relaxed);
  if (!trace_) return;
  const std::lock_guard lock(mutex_);
  if (events_.size() < kMaxTraceEvents) events_.push_back(event);
}

TrafficCounters TrafficStats::counters(TrafficKind kind) const noexcept {
  const Cell& from = cells_[static_cast<size_t>(kind)];
  return {from.operations.load(std::memory_order_relaxed),
          from.bytes.load(std::memory_order_relaxed),
          from.failures.load(std::memory_order_relaxed)};
}

std::vector<TraceEvent> TrafficStats::take_trace() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

}  // namespace kvtransfer
