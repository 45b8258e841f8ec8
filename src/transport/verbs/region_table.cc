#include "transport/verbs/region_table.h"

#include <errno.h>

#include "kvtransfer/error.h"

namespace kvtransfer {

RegionTable::RegionTable(const VerbsApi& api, ibv_pd* pd,
                         std::vector<std::shared_ptr<MemoryRegion>> regions, size_t reachable,
                         bool relaxed_ordering)
    : api_(api), pd_(pd), regions_(std::move(regions)) {
  for (size_t i = 0; i < regions_.size(); ++i) {
    const MemoryRegion& region = *regions_[i];
    unsigned access = IBV_ACCESS_LOCAL_WRITE;
    if (i < reachable) access |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    if (relaxed_ordering) access |= IBV_ACCESS_RELAXED_ORDERING;
    const auto address = reinterpret_cast<uint64_t>(region.data());
    ibv_mr* mr = api_.reg_mr(pd_, region.data(), region.bytes(), address, access);
    if (mr == nullptr) {
      const int error = errno;
      for (ibv_mr* done : registrations_) api_.dereg_mr(done);
      throw Error(ErrorCode::kExhausted,
                  "verbs: registering region " + std::to_string(i) + " of " +
                      std::to_string(region.bytes()) +
                      " bytes (pinned memory is limited: see `ulimit -l`)",
                  error);
    }
    registrations_.push_back(mr);
    keys_.push_back({address, region.bytes(), mr->lkey, mr->rkey});
  }
}

RegionTable::~RegionTable() {
  for (ibv_mr* mr : registrations_) api_.dereg_mr(mr);
}

VerbsRegion RegionTable::register_dmabuf(int fd, uint64_t offset, uint64_t bytes) {
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  ibv_mr* mr = api_.reg_dmabuf_mr(pd_, offset, bytes, offset, fd, kAccess);
  if (mr == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                "verbs: registering " + std::to_string(bytes) + " bytes of dma-buf descriptor " +
                    std::to_string(fd) + " at offset " + std::to_string(offset),
                errno);
  }
  registrations_.push_back(mr);
  return {offset, bytes, mr->lkey, mr->rkey};
}

}  // namespace kvtransfer
