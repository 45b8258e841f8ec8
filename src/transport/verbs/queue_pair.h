// QueuePair: one RC queue pair; turns lists of work requests into posts, and can be drained.
//
// Thread safety: none; belongs to one link.
// Invariants:
//  1. One post() is one doorbell. Request templates are linked once; only fields are patched.
//  2. The send queue has one entry more than the link may use: the drain marker's. Once the marker
//     has completed, or the queue pair is destroyed, no request of it can touch memory.
#pragma once

#include <span>
#include <vector>

#include "kvtransfer/link.h"
#include "kvtransfer/verbs.h"
#include "transport/verbs/api.h"
#include "transport/verbs/region_table.h"

namespace kvtransfer {

// What a completion belongs to, in the top bits of wr_id. The ring's own ids stay far below.
enum : uint64_t {
  kReceiveId = uint64_t{1} << 63,
  kDrainId = uint64_t{1} << 62,
  kCarrierId = uint64_t{1} << 61,  // a copy of an immediate on another stripe
};

class QueuePair {
 public:
  // `extended` is null where the work request API is not used. An owned queue pair is destroyed
  // here.
  QueuePair(const VerbsApi& api, ibv_qp* qp, ibv_qp_ex* extended, uint32_t send_depth, bool owned);
  QueuePair(QueuePair&& other) noexcept;
  QueuePair& operator=(QueuePair&&) = delete;
  ~QueuePair() { destroy(); }

  ibv_qp* get() const noexcept { return qp_; }
  uint32_t number() const noexcept { return number_; }
  bool uses_work_request_api() const noexcept { return extended_ != nullptr; }

  PostResult post(std::span<const WorkRequest> list, const RegionTable& local,
                  std::span<const VerbsRegion> remote) noexcept;
  // Posts `count` empty receives, in one call; each takes one immediate.
  bool post_receives(uint32_t count) noexcept;

  // To the error state, with a marker behind everything posted. Where the device refuses that, an
  // owned queue pair is destroyed instead, which is as good.
  void begin_drain() noexcept;
  void finish_drain() noexcept { drained_ = true; }
  bool drained() const noexcept { return drained_; }
  // The last resort, and the way to give the device's memory back. Idempotent.
  void destroy() noexcept;

 private:
  PostResult post_chain(std::span<const WorkRequest> list, const RegionTable& local,
                        std::span<const VerbsRegion> remote) noexcept;
  PostResult post_work_requests(std::span<const WorkRequest> list, const RegionTable& local,
                                std::span<const VerbsRegion> remote) noexcept;

  const VerbsApi& api_;
  ibv_qp* qp_;
  ibv_qp_ex* extended_;
  bool owned_;
  bool drained_ = false;
  uint32_t number_;
  std::vector<ibv_send_wr> requests_;
  std::vector<ibv_sge> pieces_;
  std::vector<ibv_recv_wr> receives_;
};

}  // namespace kvtransfer
