#include "kvtransfer/paged_cache.h"

#include <algorithm>
#include <string>

#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, "PagedCache: " + what);
}

// Adds a * b to `sum`; false on overflow.
bool add_product(uint64_t& sum, uint64_t a, uint64_t b) {
  uint64_t product;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(sum, product, &sum);
}

// First byte after the plane's last token on the last page; false on overflow.
bool plane_end(const CacheLayer& layer, const CachePlane& plane, uint32_t page_tokens,
               uint32_t num_pages, uint64_t& end) {
  end = layer.base;
  return add_product(end, plane.offset, 1) && add_product(end, layer.page_stride, num_pages - 1) &&
         add_product(end, plane.token_stride, page_tokens - 1) &&
         add_product(end, plane.bytes_per_token, 1);
}

void append(std::vector<CopyRange>& out, size_t begin, const CopyRange& range) {
  if (out.size() > begin) {
    CopyRange& last = out.back();
    if (last.cache_offset + last.length == range.cache_offset &&
        last.block_offset + last.length == range.block_offset) {
      last.length += range.length;
      return;
    }
  }
  out.push_back(range);
}

}  // namespace

PagedCache::PagedCache(uint64_t region_bytes, uint32_t page_tokens, uint32_t num_pages,
                       std::vector<CacheLayer> layers)
    : page_tokens_(page_tokens), num_pages_(num_pages), layers_(std::move(layers)) {
  require(page_tokens >= 1 && num_pages >= 1, "page_tokens and num_pages must be positive");
  require(!layers_.empty(), "needs at least one layer");
  for (size_t l = 0; l < layers_.size(); ++l) {
    require(!layers_[l].planes.empty(), "layer " + std::to_string(l) + " has no planes");
    for (const CachePlane& plane : layers_[l].planes) {
      require(plane.bytes_per_token >= 1, "a plane stores at least one byte per token");
      uint64_t end;
      require(plane_end(layers_[l], plane, page_tokens, num_pages, end) && end <= region_bytes,
              "a plane of layer " + std::to_string(l) + " ends beyond the region's " +
                  std::to_string(region_bytes) + " bytes");
    }
  }
}

void PagedCache::check_compatible(const BlockLayout& layout) const {
  for (uint32_t l = 0; l < layout.num_layers(); ++l) {
    const CacheLayer& mine = layers_[l % num_layers()];
    bool same = mine.planes.size() == layout.num_planes(l);
    for (uint32_t p = 0; same && p < layout.num_planes(l); ++p) {
      same = mine.planes[p].bytes_per_token == layout.plane_bytes(l, p);
    }
    if (!same) {
      throw Error(ErrorCode::kMismatch, "PagedCache: the planes of cache layer " +
                                            std::to_string(l % num_layers()) +
                                            " differ from the block layout's layer " +
                                            std::to_string(l) + " (" + layout.to_string() + ")");
    }
  }
}

void PagedCache::check(const BlockLayout& layout, const CopyPlanSpec& spec) const {
  require(spec.layer < layout.num_layers() && spec.cache_layer < num_layers(),
          "layer " + std::to_string(spec.layer) + " or cache layer " +
              std::to_string(spec.cache_layer) + " out of range");
  uint64_t end;
  require(!__builtin_add_overflow(spec.first_token, spec.num_tokens, &end),
          "the token range overflows");
  require(end <= uint64_t{spec.pages.size()} * page_tokens_,
          "tokens up to " + std::to_string(end) + " need more than " +
              std::to_string(spec.pages.size()) + " pages");
  require(end <= uint64_t{spec.block_starts.size()} * layout.block_tokens(),
          "tokens up to " + std::to_string(end) + " need more than " +
              std::to_string(spec.block_starts.size()) + " blocks");
  for (const int32_t page : spec.pages) {
    require(page >= 0 && static_cast<uint32_t>(page) < num_pages_,
            "page id " + std::to_string(page) + " outside 0.." + std::to_string(num_pages_ - 1));
  }
}

void PagedCache::plan(const BlockLayout& layout, const CopyPlanSpec& spec,
                      std::vector<CopyRange>& out) const {
  check(layout, spec);
  const CacheLayer& cache = layers_[spec.cache_layer];
  const size_t begin = out.size();
  const uint64_t block_tokens = layout.block_tokens();
  const uint64_t end = spec.first_token + spec.num_tokens;
  uint64_t plane_start = layout.layer_offset(spec.layer);  // within a Full Block
  for (const CachePlane& plane : cache.planes) {
    const uint64_t bytes = plane.bytes_per_token;
    const bool dense = plane.token_stride == bytes;
    for (uint64_t token = spec.first_token; token < end;) {
      const uint64_t in_block = token % block_tokens;
      const uint64_t in_page = token % page_tokens_;
      const uint64_t run =
          dense ? std::min({block_tokens - in_block, page_tokens_ - in_page, end - token}) : 1;
      const auto page = static_cast<uint64_t>(spec.pages[token / page_tokens_]);
      append(
          out, begin,
          {cache.base + page * cache.page_stride + plane.offset + in_page * plane.token_stride,
           spec.block_starts[token / block_tokens] + plane_start + in_block * bytes, run * bytes});
      token += run;
    }
    plane_start += bytes * block_tokens;
  }
}

}  // namespace kvtransfer
