#include "kvtransfer/block_layout.h"

#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

TEST(BlockLayout, FullBlockIsTheConcatenationOfItsLayerBlocks) {
  const BlockLayout layout(64, {{128, 128}, {256}, {64, 32, 32}});
  EXPECT_EQ(layout.num_layers(), 3u);
  EXPECT_EQ(layout.layer_offset(0), 0u);
  for (uint32_t l = 0; l < 3; ++l) {
    EXPECT_EQ(layout.layer_offset(l) + layout.layer_bytes(l), layout.layer_offset(l + 1));
  }
  EXPECT_EQ(layout.full_block_bytes(), 64u * (256 + 256 + 128));
  EXPECT_EQ(layout.bytes_per_token(), 640u);
}

TEST(BlockLayout, DigestAndEqualityTellLayoutsApart) {
  const BlockLayout a(4, 64, {128, 128});
  EXPECT_EQ(a, BlockLayout(64, {{128, 128}, {128, 128}, {128, 128}, {128, 128}}));
  EXPECT_EQ(a.digest(), BlockLayout(4, 64, {128, 128}).digest());
  for (const BlockLayout& other :
       {BlockLayout(4, 32, {128, 128}), BlockLayout(4, 64, {256}), BlockLayout(2, 64, {128, 128}),
        BlockLayout(64, {{128, 128}, {128}, {128, 128}, {128}})}) {
    EXPECT_FALSE(a == other);
    EXPECT_NE(a.digest(), other.digest());
  }
}

TEST(BlockLayout, RefusesImpossibleSizes) {
  EXPECT_THROW(BlockLayout(0, 64, {128}), Error);
  EXPECT_THROW(BlockLayout(1024, 64, {128}), Error);
  EXPECT_THROW(BlockLayout(1, 0, {128}), Error);
  EXPECT_THROW(BlockLayout(1, 64, {}), Error);
  EXPECT_THROW(BlockLayout(1, 64, {0}), Error);
  EXPECT_THROW(BlockLayout(1, 64, {BlockLayout::kMaxPlaneBytes + 1}), Error);
  EXPECT_THROW(BlockLayout(1023, 1 << 16, {1 << 24}), Error);  // 2^50 bytes
}

TEST(BlockLayout, CutsAreAlignedCoverAllLayersAndNeverExceedTheWish) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const uint32_t layers = 1 + random() % 40;
    const uint32_t tokens = 1u << random() % 7;
    const BlockLayout layout(layers, tokens, {static_cast<uint32_t>(32 * (1 + random() % 8))});
    const uint32_t wish = 1 + random() % 50;
    const auto cuts = layout.cut_layers(wish, 4096);
    ASSERT_GE(cuts.size(), 2u);
    ASSERT_LE(cuts.size() - 1, std::min(wish, layers));
    EXPECT_EQ(cuts.front(), 0u);
    EXPECT_EQ(cuts.back(), layers);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      EXPECT_LT(cuts[i], cuts[i + 1]);
      EXPECT_EQ(layout.layer_offset(cuts[i]) % 4096, 0u);
    }
  }
}

TEST(BlockLayout, OnePartIsTheWholeBlockAndOnePerLayerIsPossibleWhenAligned) {
  const BlockLayout layout(12, 64, {128, 128, 128, 128});
  EXPECT_EQ(layout.cut_layers(1, 4096), (std::vector<uint32_t>{0, 12}));
  EXPECT_EQ(layout.cut_layers(12, 4096).size(), 13u);
}

}  // namespace
}  // namespace kvtransfer
