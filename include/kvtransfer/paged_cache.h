// PagedCache: how an engine's paged KV-cache lies in one memory region, and the planner that turns
// (layer, pages, block slots, token range) into the fewest contiguous ranges.
//
// Token t of a sequence lives in page `pages[t / page_tokens]`, at
//   base + page * page_stride + plane.offset + (t % page_tokens) * plane.token_stride
// and, on the storage side, in the plane's row `t % block_tokens` of block `t / block_tokens`. A
// page may be smaller than, equal to, or larger than a token block. Strides are whatever the engine
// declares (padded pages, interleaved planes); nothing is guessed from shapes.
//
//   K and V apart       2 planes      one per head, K and V   2H planes
//   packed K|V          1 plane       MLA                     1 plane
//
// Immutable after construction; any thread may read it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvtransfer/block_layout.h"

namespace kvtransfer {

struct CachePlane {
  uint64_t offset;           // of the plane's first token, from the page's start
  uint64_t token_stride;     // bytes from one token to the next
  uint32_t bytes_per_token;  // what is stored of each token
};

struct CacheLayer {
  uint64_t base;         // of page 0, from the region's start
  uint64_t page_stride;  // bytes from one page to the next
  std::vector<CachePlane> planes;
};

// `length` bytes at `cache_offset` of the cache's region and at `block_offset` of the pool's
// region.
struct CopyRange {
  uint64_t cache_offset;
  uint64_t block_offset;
  uint64_t length;

  bool operator==(const CopyRange&) const = default;
};

// Which bytes to move: tokens [first_token, first_token + num_tokens) of one sequence and layer.
struct CopyPlanSpec {
  uint32_t layer = 0;  // of the model, in the BlockLayout
  uint32_t cache_layer =
      0;  // of the cache; differs from `layer` when the cache is a ring of layers
  uint64_t first_token = 0;
  uint64_t num_tokens = 0;
  std::span<const int32_t> pages;          // pages[i] holds tokens [i * page_tokens, ...)
  std::span<const uint64_t> block_starts;  // byte offset of each Full Block in the pool's region
};

class PagedCache {
 public:
  // Throws Error(kInvalidArgument) when a plane leaves [0, region_bytes) on any page.
  PagedCache(uint64_t region_bytes, uint32_t page_tokens, uint32_t num_pages,
             std::vector<CacheLayer> layers);

  uint32_t page_tokens() const noexcept { return page_tokens_; }
  uint32_t num_pages() const noexcept { return num_pages_; }
  uint32_t num_layers() const noexcept { return static_cast<uint32_t>(layers_.size()); }
  const CacheLayer& layer(uint32_t index) const noexcept { return layers_[index]; }

  // Throws Error(kMismatch) unless each cache layer can hold each of the layout's layers: the same
  // number of planes with the same bytes per token.
  void check_compatible(const BlockLayout& layout) const;

  // Appends the ranges to `out`, coalescing wherever both sides continue.
  // Throws Error(kInvalidArgument) for a page id, token or block out of range.
  void plan(const BlockLayout& layout, const CopyPlanSpec& spec, std::vector<CopyRange>& out) const;

 private:
  void check(const BlockLayout& layout, const CopyPlanSpec& spec) const;

  uint32_t page_tokens_;
  uint32_t num_pages_;
  std::vector<CacheLayer> layers_;
};

}  // namespace kvtransfer
