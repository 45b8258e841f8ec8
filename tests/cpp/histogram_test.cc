#include "base/histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvtransfer {
namespace {

TEST(Histogram, AnEmptyOneHasNoPercentiles) {
  EXPECT_EQ(Histogram().percentile(0.5), 0);
}

TEST(Histogram, PercentilesAreAtMostAnEighthTooLargeAndNeverTooSmall) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50; ++round) {
    Histogram histogram;
    std::vector<int64_t> values(1 + random() % 500);
    for (int64_t& value : values) {
      value = static_cast<int64_t>(random() >> (1 + random() % 62));
      histogram.record(value);
    }
    std::sort(values.begin(), values.end());
    for (const double share : {0.0, 0.5, 0.9, 0.99}) {
      const auto wanted = values[static_cast<size_t>(share * static_cast<double>(values.size()))];
      const int64_t got = histogram.percentile(share);
      EXPECT_GE(got, wanted);
      EXPECT_LE(got - wanted, wanted / 8) << wanted;
    }
  }
}

TEST(Histogram, AbsurdDurationsAreCountedToo) {
  Histogram histogram;
  histogram.record(-5);
  EXPECT_EQ(histogram.percentile(0.5), 0);
  histogram.record(INT64_MAX);
  EXPECT_EQ(histogram.percentile(1), INT64_MAX);
}

}  // namespace
}  // namespace kvtransfer
