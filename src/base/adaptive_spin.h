// AdaptiveSpin: how long to look again before sleeping. Sleeping and being woken costs tens of
// microseconds, spinning costs a core: so it spins only while that has lately found something.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvtransfer {

class AdaptiveSpin {
 public:
  explicit AdaptiveSpin(int64_t max_ns) noexcept : max_ns_(max_ns), budget_ns_(max_ns) {}

  // Something was done: spinning, if that was going on, has paid.
  void found() noexcept {
    if (idle_since_ns_ >= 0) budget_ns_ = std::min(budget_ns_ * 2 + kStepNs, max_ns_);
    idle_since_ns_ = -1;
  }
  // Nothing to do: true to look again, false to sleep.
  bool keep_looking(int64_t now_ns) noexcept {
    if (idle_since_ns_ < 0) idle_since_ns_ = now_ns;
    if (now_ns - idle_since_ns_ < budget_ns_) return true;
    budget_ns_ /= 2;  // in vain; below a step it is zero until something is found quickly again
    if (budget_ns_ < kStepNs) budget_ns_ = 0;
    return false;
  }
  // Woken from sleep after `asleep_ns`: a short sleep would have been worth spinning for.
  void slept(int64_t asleep_ns) noexcept {
    idle_since_ns_ = -1;
    if (asleep_ns < max_ns_) budget_ns_ = std::min(budget_ns_ + kStepNs, max_ns_);
  }
  int64_t budget_ns() const noexcept { return budget_ns_; }

 private:
  static constexpr int64_t kStepNs = 2'000;
  const int64_t max_ns_;
  int64_t budget_ns_;
  int64_t idle_since_ns_ = -1;
};

}  // namespace kvtransfer
