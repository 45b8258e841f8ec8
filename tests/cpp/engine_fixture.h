// One engine of the traffic manager's tests: a pool, a device cache, a manager.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include "kvtransfer/traffic_manager.h"
#include "test_support.h"

namespace kvtransfer::testing {

constexpr uint32_t kLayers = 6;
constexpr uint32_t kBlockTokens = 16;
constexpr uint32_t kTokens = 150;  // nine blocks and a partial one
constexpr uint32_t kBlocks = 10;

inline std::string address_of(const std::string& name) {
  return "kvt-tm-" + std::to_string(getpid()) + "-" + name;
}

// One engine: a pool, a device cache of `slots` layer slots, a manager.
struct Engine {
  Engine(const std::string& name, uint32_t cache_layers,
         std::shared_ptr<BlockStore> store = nullptr, TrafficOptions options = {})
      : layout(kLayers, kBlockTokens, {256, 256}) {
    const uint64_t plane = 20 * 16 * 256;
    device = std::make_shared<MemoryRegion>(cache_layers * 2 * plane, RegionKind::kShared,
                                            HugePages::kOff);
    std::vector<CacheLayer> layers;
    for (uint32_t l = 0; l < cache_layers; ++l) {
      layers.push_back({l * 2 * plane, 16 * 256, {{0, 256, 256}, {plane, 256, 256}}});
    }
    cache = std::make_shared<PagedCache>(device->bytes(), 16, 20, layers);
    pool = make_pool(layout, 24);
    options.name = name;
    options.listen = address_of(name);
    manager = std::make_shared<TrafficManager>(store, pool, device, layout, options);
  }
  std::vector<uint64_t> starts(const std::vector<uint32_t>& slots) const {
    std::vector<uint64_t> out;
    for (const uint32_t slot : slots) out.push_back(pool->payload_offset(slot));
    return out;
  }
  MoveSpec move(const std::vector<uint64_t>& block_starts, uint64_t first = 0,
                uint64_t count = kTokens) const {
    MoveSpec spec;
    spec.cache = cache;
    for (int32_t page = 0; page < 10; ++page) spec.pages.push_back(page + 3);
    spec.block_starts = block_starts;
    spec.first_token = first;
    spec.num_tokens = count;
    spec.deadline_ns = in_seconds(20);
    return spec;
  }
  // The bytes of one layer's token, planes one after another.
  std::vector<uint8_t> token(uint32_t layer, uint32_t t) const {
    std::vector<uint8_t> out;
    for (const CachePlane& plane : cache->layer(layer % cache->num_layers()).planes) {
      const uint8_t* at = device->data() + cache->layer(layer % cache->num_layers()).base +
                          (t / 16 + 3) * 16 * 256 + plane.offset + t % 16 * 256;
      out.insert(out.end(), at, at + 256);
    }
    return out;
  }
  void fill_slots(const std::vector<uint32_t>& slots, uint64_t seed) {
    for (size_t i = 0; i < slots.size(); ++i) {
      fill_random(pool->region()->data() + pool->payload_offset(slots[i]),
                  layout.full_block_bytes(), seed + i);
    }
  }

  BlockLayout layout;
  std::shared_ptr<MemoryRegion> device;
  std::shared_ptr<PagedCache> cache;
  std::shared_ptr<BufferPool> pool;
  std::shared_ptr<TrafficManager> manager;
};

inline bool wait_all(LayerStream& stream, double seconds = 10) {
  for (uint32_t l = 0; l < stream.num_layers(); ++l) {
    if (stream.wait(l, in_seconds(seconds)) != WaitResult::kReady) return false;
  }
  return true;
}

}  // namespace kvtransfer::testing
