// RegionTable: the memory registrations of one protection domain. Owns them; they go before the
// protection domain does. Immutable after construction, but for added dma-buf regions.
#pragma once

#include <memory>
#include <vector>

#include "kvtransfer/memory_region.h"
#include "kvtransfer/verbs.h"
#include "transport/verbs/api.h"

namespace kvtransfer {

class RegionTable {
 public:
  // The first `reachable` regions may be read and written by whom has their key. Throws
  // Error(kExhausted).
  RegionTable(const VerbsApi& api, ibv_pd* pd, std::vector<std::shared_ptr<MemoryRegion>> regions,
              size_t reachable, bool relaxed_ordering);
  ~RegionTable();
  RegionTable(const RegionTable&) = delete;

  size_t size() const noexcept { return keys_.size(); }
  // Zero keys, which every device refuses, for an index that isn't there.
  VerbsRegion operator[](size_t index) const noexcept {
    return index < keys_.size() ? keys_[index] : VerbsRegion{};
  }
  VerbsRegion register_dmabuf(int fd, uint64_t offset, uint64_t bytes);

 private:
  const VerbsApi& api_;
  ibv_pd* pd_;
  std::vector<std::shared_ptr<MemoryRegion>> regions_;
  std::vector<VerbsRegion> keys_;
  std::vector<ibv_mr*> registrations_;
};

}  // namespace kvtransfer
