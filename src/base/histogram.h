// Histogram: counts of durations in buckets that grow by an eighth of an octave, for percentiles.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace kvtransfer {

// Thread safety: one thread records, any thread reads (plain counters).
class Histogram {
 public:
  void record(int64_t value) noexcept {
    counts_[bucket_of(value)].fetch_add(1, std::memory_order_relaxed);
  }
  // The upper end of the bucket below which a share of all values lies (at most an eighth too
  // large); 0 when there are none.
  int64_t percentile(double share) const noexcept {
    uint64_t total = 0;
    for (const auto& count : counts_) total += count.load(std::memory_order_relaxed);
    const auto wanted = static_cast<uint64_t>(share * static_cast<double>(total));
    uint64_t seen = 0;
    for (size_t i = 0; total > 0 && i < kBuckets; ++i) {
      seen += counts_[i].load(std::memory_order_relaxed);
      if (seen > wanted || seen == total) return upper_end(i);
    }
    return 0;
  }

 private:
  static constexpr int kStepBits = 3;
  static constexpr size_t kBuckets = (64 - kStepBits) << kStepBits;

  // The position of the highest bit, and the three bits below it.
  static size_t bucket_of(int64_t value) noexcept {
    const auto v = static_cast<uint64_t>(value < 0 ? 0 : value);
    if (v < (uint64_t{1} << kStepBits)) return v;
    const int octave = std::bit_width(v) - 1 - kStepBits;
    return (static_cast<size_t>(octave + 1) << kStepBits) + ((v >> octave) & 7);
  }
  static int64_t upper_end(size_t bucket) noexcept {
    if (bucket < (size_t{1} << kStepBits)) return static_cast<int64_t>(bucket);
    const size_t octave = (bucket >> kStepBits) - 1;
    return static_cast<int64_t>((((bucket & 7) + 9) << octave) - 1);
  }

  std::array<std::atomic<uint64_t>, kBuckets> counts_{};
};

}  // namespace kvtransfer
