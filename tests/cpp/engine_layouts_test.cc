// The caches that serving stacks hand over, described by strides and checked against their own
// index formulas: vLLM's six physical layouts, SGLang's token-major pool, transformers' contiguous
// cache.
#include <cstring>
#include <functional>
#include <map>
#include <numeric>

#include "device/host_copy.h"
#include "kvtransfer/error.h"
#include "kvtransfer/paged_cache.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

constexpr uint32_t kLayers = 3, kBlocks = 6, kHeads = 2, kTokens = 8;
constexpr uint32_t kContent = 12;  // bytes of one head and token, K and V packed

// A layout by name: the order of L(ayers), B(locks), H(eads), N (tokens); content is innermost.
struct Strides {
  explicit Strides(const std::string& order) {
    const std::map<char, uint64_t> sizes = {
        {'L', kLayers}, {'B', kBlocks}, {'H', kHeads}, {'N', kTokens}};
    uint64_t stride = kContent;
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      of[*it] = stride;
      stride *= sizes.at(*it);
    }
    total = stride;
  }
  uint64_t at(uint32_t layer, uint64_t block, uint32_t head, uint32_t token) {
    return layer * of['L'] + block * of['B'] + head * of['H'] + token * of['N'];
  }
  std::map<char, uint64_t> of;
  uint64_t total;
};

PagedCache describe(Strides& s) {
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < kLayers; ++l) {
    CacheLayer layer{l * s.of['L'], s.of['B'], {}};
    for (uint32_t h = 0; h < kHeads; ++h)
      layer.planes.push_back({h * s.of['H'], s.of['N'], kContent});
    layers.push_back(layer);
  }
  return PagedCache(s.total, kTokens, kBlocks, layers);
}

// Gathers a sequence and checks each byte with `at`, then scatters it back over noise.
void check_round_trip(const PagedCache& cache, const BlockLayout& layout, uint64_t cache_bytes,
                      const std::vector<int32_t>& pages, uint64_t tokens,
                      const std::function<uint64_t(uint32_t, int32_t, uint32_t, uint32_t)>& at) {
  const uint64_t blocks = (tokens + layout.block_tokens() - 1) / layout.block_tokens();
  std::vector<uint64_t> starts;
  for (uint64_t b = 0; b < blocks; ++b)
    starts.push_back((blocks - 1 - b) * layout.full_block_bytes());
  std::vector<uint8_t> device(cache_bytes), pool(blocks * layout.full_block_bytes());
  testing::fill_random(device.data(), device.size(), tokens);
  std::vector<CopyRange> ranges;
  for (uint32_t l = 0; l < kLayers; ++l) {
    cache.plan(layout, {l, l, 0, tokens, pages, starts}, ranges);
  }
  gather_ranges(device.data(), pool.data(), ranges);
  const uint32_t page_tokens = cache.page_tokens();
  for (uint32_t l = 0; l < kLayers; ++l) {
    for (uint64_t t = 0; t < tokens; ++t) {
      uint64_t row = starts[t / layout.block_tokens()] + layout.layer_offset(l);
      for (uint32_t p = 0; p < layout.num_planes(l); ++p) {
        const uint32_t bytes = layout.plane_bytes(l, p);
        const uint64_t from =
            at(l, pages[t / page_tokens], p, static_cast<uint32_t>(t % page_tokens));
        ASSERT_EQ(std::memcmp(pool.data() + row + t % layout.block_tokens() * bytes,
                              device.data() + from, bytes),
                  0)
            << "layer " << l << " token " << t << " plane " << p;
        row += uint64_t{bytes} * layout.block_tokens();
      }
    }
  }
  std::vector<uint8_t> other(cache_bytes);
  scatter_ranges(other.data(), pool.data(), ranges);
  for (const CopyRange& r : ranges) {
    ASSERT_EQ(std::memcmp(other.data() + r.cache_offset, device.data() + r.cache_offset, r.length),
              0);
  }
}

class VllmLayoutTest : public ::testing::TestWithParam<const char*> {};

TEST_P(VllmLayoutTest, MovesTheBytesThatTheLayoutNames) {
  Strides strides(GetParam());
  const PagedCache cache = describe(strides);
  for (const uint32_t block_tokens : {4u, 8u, 16u, 5u}) {  // smaller, equal, larger, odd
    const BlockLayout layout(kLayers, block_tokens, std::vector<uint32_t>(kHeads, kContent));
    cache.check_compatible(layout);
    for (const uint64_t tokens : {1u, 7u, 8u, 30u, 40u}) {
      check_round_trip(cache, layout, strides.total, {4, 1, 5, 0, 2}, tokens,
                       [&](uint32_t l, int32_t page, uint32_t plane, uint32_t t) {
                         return strides.at(l, static_cast<uint64_t>(page), plane, t);
                       });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Physical, VllmLayoutTest,
                         ::testing::Values("LBHN", "LBNH", "LHBN", "BLHN", "BLNH", "BHLN"),
                         [](const auto& info) { return std::string(info.param) + "C"; });

TEST(EngineLayouts, WhereTokensOfAHeadAreAdjacentAPageIsOneRangeAPlane) {
  Strides hnd("LBHN"), nhd("LBNH");
  const BlockLayout layout(kLayers, kTokens, std::vector<uint32_t>(kHeads, kContent));
  const std::vector<int32_t> pages = {3};
  const std::vector<uint64_t> starts = {0};
  std::vector<CopyRange> a, b;
  describe(hnd).plan(layout, {0, 0, 0, kTokens, pages, starts}, a);
  describe(nhd).plan(layout, {0, 0, 0, kTokens, pages, starts}, b);
  // Heads are adjacent in the page and in the block: one range. Interleaved heads: one a token.
  EXPECT_EQ(a.size(), 1u);
  EXPECT_EQ(b.size(), kHeads * kTokens);
}

TEST(EngineLayouts, NhdWithAllHeadsAsOnePlaneIsDense) {
  const uint32_t row = kHeads * kContent;
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < kLayers; ++l) {
    layers.push_back(
        {uint64_t{l} * kBlocks * kTokens * row, uint64_t{kTokens} * row, {{0, row, row}}});
  }
  const uint64_t bytes = uint64_t{kLayers} * kBlocks * kTokens * row;
  const PagedCache cache(bytes, kTokens, kBlocks, layers);
  const BlockLayout layout(kLayers, 16, {row});
  std::vector<CopyRange> ranges;
  const std::vector<int32_t> pages = {0, 1, 2, 3};
  const std::vector<uint64_t> starts = {0, layout.full_block_bytes()};
  cache.plan(layout, {0, 0, 0, 32, pages, starts}, ranges);
  EXPECT_EQ(ranges.size(), 2u) << "one range a block: adjacent pages coalesce";
  check_round_trip(
      cache, layout, bytes, {5, 2, 0, 1}, 30, [&](uint32_t l, int32_t page, uint32_t, uint32_t t) {
        return (uint64_t{l} * kBlocks + static_cast<uint64_t>(page)) * kTokens * row + t * row;
      });
}

TEST(EngineLayouts, SglangTokenPoolsHavePagesOfOneTokenAndApartPlanes) {
  const uint32_t slots = 64, row = 24;
  std::vector<CacheLayer> layers;
  const uint64_t plane = uint64_t{slots} * row;
  for (uint32_t l = 0; l < kLayers; ++l) {
    layers.push_back({l * 2 * plane, row, {{0, row, row}, {plane, row, row}}});
  }
  const PagedCache cache(kLayers * 2 * plane, 1, slots, layers);
  const BlockLayout layout(kLayers, 16, {row, row});
  std::vector<int32_t> indices(40);
  std::iota(indices.begin(), indices.end(), 10);
  std::swap(indices[3], indices[30]);
  check_round_trip(cache, layout, kLayers * 2 * plane, indices, 40,
                   [&](uint32_t l, int32_t index, uint32_t p, uint32_t) {
                     return l * 2 * plane + p * plane + static_cast<uint64_t>(index) * row;
                   });
  std::vector<CopyRange> ranges;
  const std::vector<uint64_t> starts = {0, 10'000, 20'000};
  std::iota(indices.begin(), indices.end(), 10);
  cache.plan(layout, {0, 0, 0, 40, indices, starts}, ranges);
  EXPECT_EQ(ranges.size(), 2u * 3) << "a run of token slots is one range a block and plane";
}

TEST(EngineLayouts, OnePageAsLongAsTheSequenceIsATransformersCache) {
  const uint32_t capacity = 100, dim = 16;  // [2, heads, capacity, dim] a layer
  const uint64_t plane = uint64_t{capacity} * dim;
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < kLayers; ++l) {
    CacheLayer layer{l * 2 * kHeads * plane, 2 * kHeads * plane, {}};
    for (uint32_t p = 0; p < 2 * kHeads; ++p) layer.planes.push_back({p * plane, dim, dim});
    layers.push_back(layer);
  }
  const uint64_t bytes = kLayers * 2 * kHeads * plane;
  const PagedCache cache(bytes, capacity, 1, layers);
  const BlockLayout layout(kLayers, 16, std::vector<uint32_t>(2 * kHeads, dim));
  check_round_trip(cache, layout, bytes, {0}, 77, [&](uint32_t l, int32_t, uint32_t p, uint32_t t) {
    return l * 2 * kHeads * plane + p * plane + t * dim;
  });
}

TEST(EngineLayouts, PaddedPagesAreSteppedByTheirStride) {
  const uint32_t row = 32, padded = kTokens * row + 96;
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < kLayers; ++l) {
    layers.push_back({uint64_t{l} * kBlocks * padded, padded, {{64, row, row}}});
  }
  const uint64_t bytes = uint64_t{kLayers} * kBlocks * padded;
  const PagedCache cache(bytes, kTokens, kBlocks, layers);
  check_round_trip(cache, BlockLayout(kLayers, 16, {row}), bytes, {0, 1, 5}, 20,
                   [&](uint32_t l, int32_t page, uint32_t, uint32_t t) {
                     return (uint64_t{l} * kBlocks + static_cast<uint64_t>(page)) * padded + 64 +
                            t * row;
                   });
}

TEST(EngineLayouts, HybridModelsHaveLayersOfTheirOwnSize) {
  const BlockLayout layout(16, {{32, 32}, {64}, {32, 32}});
  std::vector<CacheLayer> layers = {{0, 16 * 64, {{0, 32, 32}, {16 * 32, 32, 32}}},
                                    {8192, 16 * 64, {{0, 64, 64}}},
                                    {16384, 16 * 64, {{0, 32, 32}, {16 * 32, 32, 32}}}};
  const PagedCache cache(32768, 16, 4, layers);
  cache.check_compatible(layout);
  check_round_trip(cache, layout, 32768, {2, 0, 3}, 40,
                   [&](uint32_t l, int32_t page, uint32_t p, uint32_t t) {
                     const uint64_t base = l * 8192ul + static_cast<uint64_t>(page) * 16 * 64;
                     return l == 1 ? base + t * 64 : base + p * 16 * 32 + t * 32;
                   });
  EXPECT_THROW(cache.check_compatible(BlockLayout(3, 16, {32, 32})), Error);
}

}  // namespace
}  // namespace kvtransfer
