#include "base/adaptive_spin.h"

#include "test_support.h"

namespace kvtransfer {
namespace {

TEST(AdaptiveSpin, SpinsForItsBudgetAndThenSleeps) {
  AdaptiveSpin spin(20'000);
  EXPECT_TRUE(spin.keep_looking(1'000));
  EXPECT_TRUE(spin.keep_looking(20'000));
  EXPECT_FALSE(spin.keep_looking(21'000));
}

TEST(AdaptiveSpin, SpinningInVainEndsItAndShortSleepsBringItBack) {
  AdaptiveSpin spin(16'000);
  int64_t now = 0;
  for (int period = 0; period < 6; ++period) {
    while (spin.keep_looking(now)) now += 500;
    spin.slept(1'000'000);
    now += 1'000'000;
  }
  EXPECT_EQ(spin.budget_ns(), 0);
  EXPECT_FALSE(spin.keep_looking(now));
  for (int period = 0; period < 3; ++period) spin.slept(3'000);
  EXPECT_GT(spin.budget_ns(), 0);
  EXPECT_TRUE(spin.keep_looking(now));
}

TEST(AdaptiveSpin, FindingSomethingWhileSpinningRaisesTheBudgetToItsLimit) {
  AdaptiveSpin spin(16'000);
  int64_t now = 0;
  while (spin.keep_looking(now)) now += 500;
  spin.slept(1'000'000);
  const int64_t low = spin.budget_ns();
  for (int round = 0; round < 10; ++round) {
    spin.keep_looking(now);
    spin.found();
  }
  EXPECT_GT(spin.budget_ns(), low);
  EXPECT_LE(spin.budget_ns(), 16'000);
}

TEST(AdaptiveSpin, ZeroNeverSpins) {
  AdaptiveSpin spin(0);
  EXPECT_FALSE(spin.keep_looking(5));
}

}  // namespace
}  // namespace kvtransfer
