// Shared by the tests: temporary directories, keys, random layouts, deadlines.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kvtransfer/block_store.h"
#include "store/block_file.h"

namespace kvtransfer::testing {

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& parent = ::testing::TempDir()) {
    std::string pattern = parent + "/kvtransfer-test-" + std::string(6, 'X');  // mkdtemp fills them
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline BlockKey make_key(uint64_t seed) {
  std::mt19937_64 random(seed);
  BlockKey key;
  for (uint8_t& byte : key) byte = static_cast<uint8_t>(random());
  return key;
}

// A chain of `count` blocks under `root`; different `branch`es share nothing.
inline std::vector<BlockId> make_chain(const BlockKey& root, uint32_t count, uint64_t branch = 0) {
  std::vector<BlockKey> keys;
  for (uint32_t i = 0; i < count; ++i) keys.push_back(make_key(1000 * (branch + 1) + i));
  return chain_ids(root, keys);
}

inline std::shared_ptr<BufferPool> make_pool(const BlockLayout& layout, uint32_t slots,
                                             RegionKind kind = RegionKind::kShared) {
  const uint32_t header = header_pages_bytes(layout.num_layers());
  const uint64_t bytes = slots * BufferPool::slot_bytes(header, layout.full_block_bytes());
  auto region = std::make_shared<MemoryRegion>(bytes, kind, HugePages::kOff);
  return std::make_shared<BufferPool>(region, header, layout.full_block_bytes());
}

inline void fill_random(uint8_t* data, size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(random());
}

inline std::vector<uint8_t> payload_of(const BufferPool& pool, uint32_t slot,
                                       const BlockLayout& layout) {
  const uint8_t* at = pool.region()->data() + pool.payload_offset(slot);
  return {at, at + layout.full_block_bytes()};
}

inline int64_t in_seconds(double seconds) {
  return now_ns() + static_cast<int64_t>(seconds * 1e9);
}

inline std::vector<uint32_t> acquire(BufferPool& pool, uint32_t count) {
  std::vector<uint32_t> slots(count);
  EXPECT_TRUE(pool.acquire(slots));
  return slots;
}

}  // namespace kvtransfer::testing
