#include "device/host_copy.h"

#include "base/copy.h"

namespace kvtransfer {

void scatter_ranges(uint8_t* cache, const uint8_t* pool,
                    std::span<const CopyRange> ranges) noexcept {
  for (const CopyRange& range : ranges) {
    copy_bytes(cache + range.cache_offset, pool + range.block_offset, range.length);
  }
}

void gather_ranges(const uint8_t* cache, uint8_t* pool,
                   std::span<const CopyRange> ranges) noexcept {
  for (const CopyRange& range : ranges) {
    copy_bytes(pool + range.block_offset, cache + range.cache_offset, range.length);
  }
}

uint64_t total_bytes(std::span<const CopyRange> ranges) noexcept {
  uint64_t bytes = 0;
  for (const CopyRange& range : ranges) bytes += range.length;
  return bytes;
}

}  // namespace kvtransfer
