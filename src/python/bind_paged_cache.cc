#include "bind.h"
#include "device/host_copy.h"
#include "kvtransfer/memory_region.h"
#include "kvtransfer/paged_cache.h"

namespace kvtransfer::python {

namespace {

std::vector<CopyRange> plan(const PagedCache& cache, const BlockLayout& layout, uint32_t layer,
                            uint32_t cache_layer, const Array<int32_t>& pages,
                            const Array<uint64_t>& block_starts, uint64_t first_token,
                            uint64_t num_tokens) {
  std::vector<CopyRange> ranges;
  cache.check_compatible(layout);
  cache.plan(layout,
             {.layer = layer,
              .cache_layer = cache_layer,
              .first_token = first_token,
              .num_tokens = num_tokens,
              .pages = {pages.data(), static_cast<size_t>(pages.size())},
              .block_starts = {block_starts.data(), static_cast<size_t>(block_starts.size())}},
             ranges);
  return ranges;
}

// Moves all layers of a token range between a cache region and a pool region.
template <class Copy>
uint64_t copy_layers(const PagedCache& cache, const BlockLayout& layout,
                     const Array<int32_t>& pages, const Array<uint64_t>& block_starts,
                     const MemoryRegion& pool, uint64_t first_token, uint64_t num_tokens,
                     Copy&& copy) {
  std::vector<CopyRange> ranges;
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const auto more =
        plan(cache, layout, layer, layer, pages, block_starts, first_token, num_tokens);
    ranges.insert(ranges.end(), more.begin(), more.end());
  }
  for (const CopyRange& range : ranges) {
    if (range.block_offset + range.length > pool.bytes()) {
      throw Error(ErrorCode::kInvalidArgument, "a block leaves the pool");
    }
  }
  const py::gil_scoped_release release;
  copy(ranges);
  return total_bytes(ranges);
}

}  // namespace

void bind_paged_cache(py::module_& m) {
  py::class_<CachePlane>(m, "CachePlane")
      .def(py::init<uint64_t, uint64_t, uint32_t>(), py::arg("offset"), py::arg("token_stride"),
           py::arg("bytes_per_token"))
      .def_readonly("offset", &CachePlane::offset)
      .def_readonly("token_stride", &CachePlane::token_stride)
      .def_readonly("bytes_per_token", &CachePlane::bytes_per_token);
  py::class_<CacheLayer>(m, "CacheLayer")
      .def(py::init<uint64_t, uint64_t, std::vector<CachePlane>>(), py::arg("base"),
           py::arg("page_stride"), py::arg("planes"))
      .def_readonly("base", &CacheLayer::base)
      .def_readonly("page_stride", &CacheLayer::page_stride)
      .def_readonly("planes", &CacheLayer::planes);
  py::class_<PagedCache, std::shared_ptr<PagedCache>>(
      m, "PagedCache", "How an engine's paged KV-cache lies in one memory region.")
      .def(py::init<uint64_t, uint32_t, uint32_t, std::vector<CacheLayer>>(),
           py::arg("region_bytes"), py::arg("page_tokens"), py::arg("num_pages"), py::arg("layers"))
      .def_property_readonly("page_tokens", &PagedCache::page_tokens)
      .def_property_readonly("num_pages", &PagedCache::num_pages)
      .def_property_readonly("num_layers", &PagedCache::num_layers)
      .def("check_compatible", &PagedCache::check_compatible)
      .def(
          "plan",
          [](const PagedCache& self, const BlockLayout& layout, uint32_t layer,
             uint32_t cache_layer, const Array<int32_t>& pages, const Array<uint64_t>& block_starts,
             uint64_t first_token, uint64_t num_tokens) {
            const auto ranges = plan(self, layout, layer, cache_layer, pages, block_starts,
                                     first_token, num_tokens);
            py::array_t<uint64_t> out({static_cast<py::ssize_t>(ranges.size()), py::ssize_t{3}});
            std::copy_n(reinterpret_cast<const uint64_t*>(ranges.data()), ranges.size() * 3,
                        out.mutable_data());
            return out;
          },
          py::arg("layout"), py::arg("layer"), py::arg("cache_layer"), py::arg("pages"),
          py::arg("block_starts"), py::arg("first_token"), py::arg("num_tokens"),
          "Ranges [n, 3] of uint64: (cache offset, block offset, length in bytes).")
      .def(
          "scatter",
          [](const PagedCache& self, const BlockLayout& layout, const MemoryRegion& cache,
             const MemoryRegion& pool, const Array<int32_t>& pages,
             const Array<uint64_t>& block_starts, uint64_t first_token, uint64_t num_tokens) {
            return copy_layers(self, layout, pages, block_starts, pool, first_token, num_tokens,
                               [&](std::span<const CopyRange> ranges) {
                                 scatter_ranges(cache.data(), pool.data(), ranges);
                               });
          },
          py::arg("layout"), py::arg("cache"), py::arg("pool"), py::arg("pages"),
          py::arg("block_starts"), py::arg("first_token"), py::arg("num_tokens"),
          "Copies all layers of a token range from pool blocks to the cache; returns bytes.")
      .def(
          "gather",
          [](const PagedCache& self, const BlockLayout& layout, const MemoryRegion& cache,
             const MemoryRegion& pool, const Array<int32_t>& pages,
             const Array<uint64_t>& block_starts, uint64_t first_token, uint64_t num_tokens) {
            return copy_layers(self, layout, pages, block_starts, pool, first_token, num_tokens,
                               [&](std::span<const CopyRange> ranges) {
                                 gather_ranges(cache.data(), pool.data(), ranges);
                               });
          },
          py::arg("layout"), py::arg("cache"), py::arg("pool"), py::arg("pages"),
          py::arg("block_starts"), py::arg("first_token"), py::arg("num_tokens"),
          "The opposite of scatter.");
}

}  // namespace kvtransfer::python
