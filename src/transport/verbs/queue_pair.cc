#include "transport/verbs/queue_pair.h"

#include <arpa/inet.h>
#include <errno.h>

#include <algorithm>
#include <utility>

namespace kvtransfer {

namespace {

constexpr uint32_t kReceiveChain = 64;

ibv_wr_opcode opcode_of(LinkOp op) {
  switch (op) {
    case LinkOp::kRead:
      return IBV_WR_RDMA_READ;
    case LinkOp::kWrite:
      return IBV_WR_RDMA_WRITE;
    default:
      return IBV_WR_RDMA_WRITE_WITH_IMM;
  }
}

VerbsRegion entry(std::span<const VerbsRegion> table, uint16_t index) {
  return index < table.size() ? table[index] : VerbsRegion{};
}

}  // namespace

QueuePair::QueuePair(const VerbsApi& api, ibv_qp* qp, ibv_qp_ex* extended, uint32_t send_depth,
                     bool owned)
    : api_(api),
      qp_(qp),
      extended_(extended),
      owned_(owned),
      number_(qp->qp_num),
      requests_(send_depth),
      pieces_(send_depth),
      receives_(kReceiveChain) {
  for (size_t i = 0; i < requests_.size(); ++i) requests_[i].sg_list = &pieces_[i];
  for (size_t i = 0; i < receives_.size(); ++i) receives_[i].wr_id = kReceiveId;
}

QueuePair::QueuePair(QueuePair&& other) noexcept
    : api_(other.api_),
      qp_(std::exchange(other.qp_, nullptr)),
      extended_(std::exchange(other.extended_, nullptr)),
      owned_(other.owned_),
      drained_(other.drained_),
      number_(other.number_),
      requests_(std::move(other.requests_)),
      pieces_(std::move(other.pieces_)),  // its elements keep their addresses
      receives_(std::move(other.receives_)) {}

PostResult QueuePair::post(std::span<const WorkRequest> list, const RegionTable& local,
                           std::span<const VerbsRegion> remote) noexcept {
  if (qp_ == nullptr) return {0, ECONNRESET};
  if (list.empty()) return {};  // a chain always has a first request
  list = list.first(std::min(list.size(), requests_.size()));
  return extended_ != nullptr ? post_work_requests(list, local, remote)
                              : post_chain(list, local, remote);
}

PostResult QueuePair::post_chain(std::span<const WorkRequest> list, const RegionTable& local,
                                 std::span<const VerbsRegion> remote) noexcept {
  for (size_t i = 0; i < list.size(); ++i) {
    const WorkRequest& from = list[i];
    const VerbsRegion here = local[from.local_region];
    const VerbsRegion there = entry(remote, from.remote_region);
    pieces_[i] = {here.address + from.local_offset, static_cast<uint32_t>(from.length),
                  here.local_key};
    ibv_send_wr& to = requests_[i];
    to.wr_id = from.wr_id;
    to.next = i + 1 < list.size() ? &requests_[i + 1] : nullptr;
    to.num_sge = from.length > 0 ? 1 : 0;
    to.opcode = opcode_of(from.op);
    to.send_flags = from.signalled ? IBV_SEND_SIGNALED : 0;
    to.imm_data = htonl(from.immediate);
    to.wr.rdma.remote_addr = there.address + from.remote_offset;
    to.wr.rdma.rkey = there.remote_key;
  }
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(qp_, requests_.data(), &bad);
  if (error == 0) return {list.size(), 0};
  return {bad != nullptr ? static_cast<size_t>(bad - requests_.data()) : 0, error};
}

PostResult QueuePair::post_work_requests(std::span<const WorkRequest> list,
                                         const RegionTable& local,
                                         std::span<const VerbsRegion> remote) noexcept {
  extended_->wr_start(extended_);
  for (const WorkRequest& from : list) {
    const VerbsRegion here = local[from.local_region];
    const VerbsRegion there = entry(remote, from.remote_region);
    const uint64_t address = there.address + from.remote_offset;
    extended_->wr_id = from.wr_id;
    extended_->wr_flags = from.signalled ? IBV_SEND_SIGNALED : 0;
    switch (from.op) {
      case LinkOp::kRead:
        extended_->wr_rdma_read(extended_, there.remote_key, address);
        break;
      case LinkOp::kWrite:
        extended_->wr_rdma_write(extended_, there.remote_key, address);
        break;
      default:
        extended_->wr_rdma_write_imm(extended_, there.remote_key, address, htonl(from.immediate));
    }
    if (from.length > 0) {
      extended_->wr_set_sge(extended_, here.local_key, here.address + from.local_offset,
                            static_cast<uint32_t>(from.length));
    } else {
      extended_->wr_set_sge_list(extended_, 0, nullptr);
    }
  }
  int error = extended_->wr_complete(extended_);  // all or nothing
  if (error == ENOSPC) error = ENOMEM;            // Soft-RoCE's word for a full queue
  return {error == 0 ? list.size() : 0, error};
}

bool QueuePair::post_receives(uint32_t count) noexcept {
  while (count > 0 && qp_ != nullptr) {
    const uint32_t now = std::min(count, kReceiveChain);
    for (uint32_t i = 0; i < now; ++i) {
      receives_[i].next = i + 1 < now ? &receives_[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_recv(qp_, receives_.data(), &bad) != 0) return false;
    count -= now;
  }
  return count == 0;
}

void QueuePair::begin_drain() noexcept {
  if (qp_ == nullptr) return;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  ibv_send_wr marker{};
  marker.wr_id = kDrainId;
  marker.opcode = IBV_WR_RDMA_WRITE;
  marker.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  if (api_.modify_qp(qp_, &attributes, IBV_QP_STATE) == 0 &&
      ibv_post_send(qp_, &marker, &bad) == 0) {
    return;
  }
  destroy();
}

void QueuePair::destroy() noexcept {
  if (qp_ == nullptr) return;
  if (owned_) {
    api_.destroy_qp(qp_);
    drained_ = true;
  }
  qp_ = nullptr;
  extended_ = nullptr;
}

}  // namespace kvtransfer
