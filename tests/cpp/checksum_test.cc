#include "base/checksum.h"

#include <set>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/checksum_kernel.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

// The definition in base/checksum.h, word for word.
uint64_t by_definition(const uint8_t* data, size_t bytes, uint64_t seed) {
  if (bytes < kLaneBytes) return XXH3_64bits_withSeed(data, bytes, seed);
  const size_t quarter = bytes / 4 / 64 * 64;
  uint64_t lanes[4];
  for (size_t lane = 0; lane < 4; ++lane) {
    const size_t size = lane == 3 ? bytes - 3 * quarter : quarter;
    lanes[lane] = XXH3_64bits_withSeed(data + lane * quarter, size, seed);
  }
  return XXH3_64bits_withSeed(lanes, sizeof lanes, seed);
}

TEST(Checksum, IsXxh3SoThatFilesStayReadable) {
  // Reference values of XXH3_64bits (xxHash 0.8).
  EXPECT_EQ(checksum("", 0), 0x2D06800538D394C2u);
  EXPECT_EQ(checksum("a", 1), 0xE6C632B61E964E1Fu);
}

TEST(Checksum, FollowsItsDefinitionAtAnySizeSeedAndAlignment) {
  std::vector<uint8_t> data(200'064);
  testing::fill_random(data.data(), data.size(), 5);
  std::mt19937_64 random(6);
  for (int round = 0; round < 400; ++round) {
    const size_t offset = random() % 64;
    const size_t size = round < 50 ? kLaneBytes - 25 + round : random() % 200'000;
    const uint64_t seed = round % 5 == 0 ? 0 : random() % 100;
    const uint64_t wanted = by_definition(data.data() + offset, size, seed);
    ASSERT_EQ(checksum(data.data() + offset, size, seed), wanted) << size << " seed " << seed;
    ASSERT_EQ(checksum_kernel(data.data() + offset, size, seed), wanted);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
      ASSERT_EQ(checksum_avx2(data.data() + offset, size, seed), wanted);
    }
#endif
  }
}

// Hash states live on the stack, where one of an earlier call with the same seed may be left, half
// overwritten: with its seed and without its secret.
TEST(Checksum, DoesNotDependOnWhatItsStatesHeldBefore) {
  std::vector<uint8_t> data(100'000);
  testing::fill_random(data.data(), data.size(), 7);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Lanes lanes;
    for (XXH3_state_t& lane : lanes) {
      memset(&lane, 0x5a, sizeof lane);
      lane.seed = seed;
      lane.extSecret = nullptr;
    }
    EXPECT_EQ(hash_lanes(lanes, data.data(), data.size(), seed),
              by_definition(data.data(), data.size(), seed));
  }
}

TEST(Checksum, ChangesWithEveryBitAndWithTheSeed) {
  for (const size_t size : {size_t{4096}, kLaneBytes}) {
    std::vector<uint8_t> data(size);
    testing::fill_random(data.data(), data.size(), 1);
    const uint64_t whole = checksum(data.data(), data.size());
    std::set<uint64_t> seen = {whole};
    for (size_t bit = 0; bit < 8 * data.size(); bit += 61) {
      data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      ASSERT_TRUE(seen.insert(checksum(data.data(), data.size())).second) << bit;
      data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    }
    EXPECT_NE(checksum(data.data(), data.size(), 1), whole);
    EXPECT_NE(checksum(data.data(), data.size() - 1), whole);
  }
}

TEST(Checksum, SwappedLanesAreSeen) {
  std::vector<uint8_t> data(kLaneBytes);
  testing::fill_random(data.data(), data.size(), 2);
  const uint64_t whole = checksum(data.data(), data.size());
  std::rotate(data.begin(), data.begin() + kLaneBytes / 4, data.end());
  EXPECT_NE(checksum(data.data(), data.size()), whole);
}

}  // namespace
}  // namespace kvtransfer
