// TokenBucket: a bandwidth cap on bytes. An operation may start while the bucket isn't in debt and
// then takes all its bytes at once, so that operations larger than the burst still pass and the
// average holds. Owner thread only, save for set_rate().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvtransfer {

class TokenBucket {
 public:
  // Bytes per second; 0: no cap.
  void set_rate(uint64_t rate) noexcept { rate_.store(rate, std::memory_order_relaxed); }

  // False: wait until ready_at().
  bool take(uint64_t bytes, int64_t now_ns) noexcept {
    const auto rate = static_cast<double>(rate_.load(std::memory_order_relaxed));
    if (rate == 0) return true;
    const double burst = rate * kBurstSeconds;
    tokens_ = std::min(burst, tokens_ + rate * 1e-9 * static_cast<double>(now_ns - filled_ns_));
    filled_ns_ = now_ns;
    if (tokens_ < 0) {
      ready_at_ns_ = now_ns + static_cast<int64_t>(-tokens_ / rate * 1e9) + 1;
      return false;
    }
    tokens_ -= static_cast<double>(bytes);
    return true;
  }
  // When the last refused take() can succeed.
  int64_t ready_at() const noexcept { return ready_at_ns_; }

 private:
  static constexpr double kBurstSeconds = 0.002;

  std::atomic<uint64_t> rate_{0};
  double tokens_ = 0;
  int64_t filled_ns_ = 0;
  int64_t ready_at_ns_ = 0;
};

}  // namespace kvtransfer
