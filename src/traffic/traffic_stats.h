// TrafficStats: what the progress thread did, readable from any thread. Recording can't fail an
// operation: a full trace drops events.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "kvtransfer/traffic_manager.h"

namespace kvtransfer {

class TrafficStats {
 public:
  explicit TrafficStats(bool trace) : trace_(trace) {}

  void record(const TraceEvent& event) noexcept;
  void record_failure(TrafficKind kind) noexcept {
    cell(kind).failures.fetch_add(1, std::memory_order_relaxed);
  }
  TrafficCounters counters(TrafficKind kind) const noexcept;
  std::vector<TraceEvent> take_trace();

  std::atomic<uint64_t> pending_read_bytes{0};

 private:
  static constexpr size_t kMaxTraceEvents = 1 << 20;
  struct Cell {
    std::atomic<uint64_t> operations{0}, bytes{0}, failures{0};
  };
  Cell& cell(TrafficKind kind) noexcept { return cells_[static_cast<size_t>(kind)]; }

  const bool trace_;
  std::array<Cell, kNumTrafficKinds> cells_;
  std::mutex mutex_;
  std::vector<TraceEvent> events_;  // guarded by mutex_
};

}  // namespace kvtransfer
