// The host twin of a device: batches of strided copies between a cache and a pool in host memory.
#pragma once

#include <cstdint>
#include <span>

#include "kvtransfer/paged_cache.h"

namespace kvtransfer {

// pool -> cache (a load reaching the device).
void scatter_ranges(uint8_t* cache, const uint8_t* pool,
                    std::span<const CopyRange> ranges) noexcept;
// cache -> pool (KV leaving the device).
void gather_ranges(const uint8_t* cache, uint8_t* pool, std::span<const CopyRange> ranges) noexcept;
uint64_t total_bytes(std::span<const CopyRange> ranges) noexcept;

}  // namespace kvtransfer
