#include "kvtransfer/paged_cache.h"

#include <algorithm>
#include <numeric>

#include "device/host_copy.h"
#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::fill_random;

struct Case {
  BlockLayout layout;
  PagedCache cache;
  uint64_t cache_bytes;
  std::vector<int32_t> pages;
  std::vector<uint64_t> starts;
  uint64_t pool_bytes;
  uint64_t tokens;
};

// A random engine cache: K and V apart, packed, MLA or a plane a head; dense or padded tokens,
// padded pages; pages smaller than, equal to or larger than a token block; blocks in any order.
Case random_case(std::mt19937& random) {
  const auto pick = [&](uint32_t low, uint32_t high) { return low + random() % (high - low + 1); };
  const uint32_t layers = pick(1, 4);
  const uint32_t block_tokens = pick(1, 48);
  const uint32_t page_tokens = pick(1, 96);
  const uint32_t tokens = pick(1, 300);
  std::vector<std::vector<uint32_t>> sizes(layers);
  const uint32_t planes = pick(1, 6);
  std::vector<uint32_t> same;
  for (uint32_t p = 0; p < planes; ++p) same.push_back(pick(1, 64));
  for (auto& layer : sizes) layer = same;
  const uint32_t used = (tokens + page_tokens - 1) / page_tokens;
  const uint32_t num_pages = used + pick(0, 5);
  std::vector<CacheLayer> cache_layers;
  uint64_t at = pick(0, 100);
  for (uint32_t l = 0; l < layers; ++l) {
    CacheLayer layer{at, 0, {}};
    uint64_t in_page = 0;
    for (const uint32_t bytes : same) {
      const uint64_t stride = bytes + (random() % 2 ? pick(1, 16) : 0);
      layer.planes.push_back({in_page, stride, bytes});
      in_page += stride * page_tokens;
    }
    layer.page_stride = in_page + (random() % 2 ? pick(1, 64) : 0);
    at += layer.page_stride * num_pages + pick(0, 32);
    cache_layers.push_back(layer);
  }
  const uint64_t cache_bytes = at + 64;
  BlockLayout layout(block_tokens, sizes);
  std::vector<int32_t> pages(num_pages);
  std::iota(pages.begin(), pages.end(), 0);
  if (random() % 2) std::shuffle(pages.begin(), pages.end(), random);
  pages.resize(used);
  const uint32_t blocks = (tokens + block_tokens - 1) / block_tokens;
  std::vector<uint64_t> starts;
  for (uint32_t b = 0; b < blocks; ++b) starts.push_back(b * (layout.full_block_bytes() + 32));
  if (random() % 2) std::shuffle(starts.begin(), starts.end(), random);
  return {layout,      PagedCache(cache_bytes, page_tokens, num_pages, cache_layers),
          cache_bytes, pages,
          starts,      blocks * (layout.full_block_bytes() + 32),
          tokens};
}

std::vector<CopyRange> plan_all(const Case& c, uint64_t first, uint64_t count) {
  std::vector<CopyRange> ranges;
  for (uint32_t l = 0; l < c.layout.num_layers(); ++l) {
    c.cache.plan(c.layout, {l, l, first, count, c.pages, c.starts}, ranges);
  }
  return ranges;
}

TEST(PagedCache, PlanMovesExactlyTheBytesThatTheFormulaNames) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const Case c = random_case(random);
    const uint64_t first = random() % c.tokens;
    const uint64_t count = random() % (c.tokens - first + 1);
    std::vector<uint8_t> cache(c.cache_bytes), pool(c.pool_bytes, 0xEE), wanted = pool;
    fill_random(cache.data(), cache.size(), round);
    gather_ranges(cache.data(), pool.data(), plan_all(c, first, count));
    for (uint32_t l = 0; l < c.layout.num_layers(); ++l) {
      const CacheLayer& layer = c.cache.layer(l);
      for (uint64_t t = first; t < first + count; ++t) {
        uint64_t row = c.starts[t / c.layout.block_tokens()] + c.layout.layer_offset(l);
        for (const CachePlane& plane : layer.planes) {
          const uint64_t from = layer.base +
                                c.pages[t / c.cache.page_tokens()] * layer.page_stride +
                                plane.offset + t % c.cache.page_tokens() * plane.token_stride;
          std::copy_n(
              cache.begin() + from, plane.bytes_per_token,
              wanted.begin() + row + t % c.layout.block_tokens() * uint64_t{plane.bytes_per_token});
          row += uint64_t{plane.bytes_per_token} * c.layout.block_tokens();
        }
      }
    }
    ASSERT_EQ(pool, wanted) << "round " << round;
  }
}

TEST(PagedCache, ScatterOfGatherIsTheIdentityAndTouchesNothingElse) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const Case c = random_case(random);
    const auto ranges = plan_all(c, 0, c.tokens);
    std::vector<uint8_t> cache(c.cache_bytes), pool(c.pool_bytes), back(c.cache_bytes, 0x55);
    fill_random(cache.data(), cache.size(), round);
    gather_ranges(cache.data(), pool.data(), ranges);
    std::vector<uint8_t> wanted = back;
    for (const CopyRange& r : ranges) {
      std::copy_n(cache.begin() + r.cache_offset, r.length, wanted.begin() + r.cache_offset);
    }
    scatter_ranges(back.data(), pool.data(), ranges);
    ASSERT_EQ(back, wanted) << "round " << round;
    EXPECT_EQ(total_bytes(ranges), c.tokens * c.layout.bytes_per_token());
  }
}

TEST(PagedCache, AdjacentPagesCoalesceIntoOneRangePerPlaneAndBlock) {
  // 16-token pages, adjacent; 64-token blocks: one range a plane and block, not one a page.
  const BlockLayout layout(1, 64, {128, 128});
  const PagedCache cache(1 << 20, 16, 8, {{0, 16 * 128, {{0, 128, 128}, {1 << 19, 128, 128}}}});
  const std::vector<int32_t> pages = {0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<uint64_t> starts = {1 << 16, 0};
  std::vector<CopyRange> ranges;
  cache.plan(layout, {0, 0, 0, 128, pages, starts}, ranges);
  EXPECT_EQ(ranges.size(), 4u);
  EXPECT_EQ(ranges[0], (CopyRange{0, 1 << 16, 64 * 128}));
}

TEST(PagedCache, OnePackedPageThatEqualsTheBlockIsASingleRange) {
  const BlockLayout layout(1, 64, {576});  // MLA
  const PagedCache cache(64 * 576 * 4, 64, 4, {{0, 64 * 576, {{0, 576, 576}}}});
  const std::vector<int32_t> pages = {2};
  const std::vector<uint64_t> starts = {4096};
  std::vector<CopyRange> ranges;
  cache.plan(layout, {0, 0, 0, 64, pages, starts}, ranges);
  EXPECT_EQ(ranges, (std::vector<CopyRange>{{2 * 64 * 576, 4096, 64 * 576}}));
}

TEST(PagedCache, RefusesWhatLiesOutside) {
  const BlockLayout layout(2, 16, {32});
  const PagedCache cache(16 * 32 * 4, 16, 4, {{0, 16 * 32, {{0, 32, 32}}}});
  const std::vector<int32_t> pages = {0, 3}, bad = {0, 4}, negative = {-1, 0};
  const std::vector<uint64_t> starts = {0, 4096};
  std::vector<CopyRange> out;
  EXPECT_THROW(cache.plan(layout, {0, 0, 0, 32, bad, starts}, out), Error);
  EXPECT_THROW(cache.plan(layout, {0, 0, 0, 32, negative, starts}, out), Error);
  EXPECT_THROW(cache.plan(layout, {0, 0, 1, 32, pages, starts}, out), Error);
  EXPECT_THROW(cache.plan(layout, {2, 0, 0, 32, pages, starts}, out), Error);
  EXPECT_THROW(cache.plan(layout, {0, 1, 0, 32, pages, starts}, out), Error);
  EXPECT_THROW(cache.plan(layout, {0, 0, UINT64_MAX, 2, pages, starts}, out), Error);
  EXPECT_TRUE(out.empty());
  EXPECT_THROW(PagedCache(16 * 32 * 4 - 1, 16, 4, {{0, 16 * 32, {{0, 32, 32}}}}), Error);
  EXPECT_THROW(PagedCache(1 << 20, 16, 4, {{0, UINT64_MAX / 2, {{0, 32, 32}}}}), Error);
  EXPECT_THROW(PagedCache(1 << 20, 16, 4, {}), Error);
}

TEST(PagedCache, IncompatiblePlanesAreAMismatch) {
  const PagedCache cache(1 << 20, 16, 4, {{0, 16 * 64, {{0, 32, 32}, {512, 32, 32}}}});
  EXPECT_NO_THROW(cache.check_compatible(BlockLayout(3, 16, {32, 32})));
  EXPECT_THROW(cache.check_compatible(BlockLayout(3, 16, {64})), Error);
  EXPECT_THROW(cache.check_compatible(BlockLayout(3, 16, {32, 64})), Error);
}

}  // namespace
}  // namespace kvtransfer
