// Queue pairs from RESET to RTS.
#include <errno.h>
#include <string.h>

#include <algorithm>
#include <random>

#include "kvtransfer/error.h"
#include "transport/verbs/domain.h"

namespace kvtransfer {

namespace {

uint32_t random_psn() {
  static thread_local std::random_device source;
  return source() & 0xffffff;
}

const char* state_name(ibv_qp_state state) {
  static constexpr const char* kNames[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
  return static_cast<size_t>(state) < std::size(kNames) ? kNames[state] : "unknown";
}

}  // namespace

Endpoint::Endpoint(std::shared_ptr<VerbsDevice> device, std::shared_ptr<RegionTable> regions,
                   TrafficClass traffic_class, const std::string& name, uint64_t epoch,
                   size_t announced_regions)
    : device_(std::move(device)), regions_(std::move(regions)) {
  const VerbsOptions& options = device_->options();
  const uint32_t most = device_->max_queue_depth();
  send_depth_ = std::min(options.send_depth, most - 1);
  receive_depth_ = std::min(options.receive_depth, most);
  method_ = options.post_method;
  info_.name = name;
  info_.epoch = epoch;
  memcpy(info_.gid, device_->gid().raw, sizeof info_.gid);
  info_.lid = device_->lid();
  info_.traffic_class = traffic_class;
  info_.mtu = static_cast<uint8_t>(device_->mtu());
  info_.rd_atomic = device_->rd_atomic_in();
  for (size_t i = 0; i < announced_regions; ++i) info_.regions.push_back((*regions_)[i]);
  create_completion_queue();
  for (uint32_t i = 0; i < options.queue_pairs; ++i) {
    queue_pairs_.push_back(create_queue_pair());
    to_init(queue_pairs_.back());
    info_.queue_pairs.push_back({queue_pairs_.back().number(), random_psn()});
  }
}

const ClassOfService& Endpoint::service() const noexcept {
  return device_->options().classes[static_cast<size_t>(info_.traffic_class)];
}

// Room for a completion of every request, drain marker and receive at once: it can't overrun.
void Endpoint::create_completion_queue() {
  const VerbsApi& api = device_->api();
  completions_.api = &api;
  completions_.channel = api.create_comp_channel(device_->context());
  if (completions_.channel == nullptr) {
    throw Error(ErrorCode::kExhausted, "verbs: completion channel on " + device_->describe(),
                errno);
  }
  const uint32_t entries = (send_depth_ + 1 + receive_depth_) * device_->options().queue_pairs;
  if (entries > device_->max_completions()) {
    throw Error(ErrorCode::kInvalidArgument, "verbs: depths and queue pairs need " +
                                                 std::to_string(entries) + " completion entries; " +
                                                 device_->describe() + " has " +
                                                 std::to_string(device_->max_completions()));
  }
  completions_.cq = api.create_cq(device_->context(), static_cast<int>(entries), nullptr,
                                  completions_.channel, 0);
  if (completions_.cq == nullptr) {
    throw Error(ErrorCode::kExhausted,
                "verbs: completion queue of " + std::to_string(entries) + " entries on " +
                    device_->describe(),
                errno);
  }
}

QueuePair Endpoint::create_queue_pair() {
  ibv_qp_init_attr_ex attributes{};
  attributes.send_cq = attributes.recv_cq = completions_.cq;
  attributes.cap.max_send_wr = send_depth_ + 1;
  attributes.cap.max_recv_wr = receive_depth_;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_recv_sge = 1;
  attributes.qp_type = IBV_QPT_RC;
  attributes.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attributes.pd = device_->queue_pair_pd();
  attributes.send_ops_flags =
      IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  const VerbsApi& api = device_->api();
  if (method_ != PostMethod::kPostSend) {
    verbs_context* extended = verbs_get_ctx_op(device_->context(), create_qp_ex);
    ibv_qp* qp = nullptr;
    errno = EOPNOTSUPP;
    if (extended != nullptr) qp = extended->create_qp_ex(device_->context(), &attributes);
    if (qp != nullptr) return {api, qp, api.qp_to_qp_ex(qp), send_depth_, true};
    if (method_ == PostMethod::kWorkRequestApi) {
      throw Error(ErrorCode::kUnsupported,
                  "verbs: " + device_->describe() + " has no work request API (ibv_wr_*)", errno);
    }
    method_ = PostMethod::kPostSend;
  }
  ibv_qp* qp =
      api.create_qp(device_->queue_pair_pd(), reinterpret_cast<ibv_qp_init_attr*>(&attributes));
  if (qp == nullptr) {
    throw Error(ErrorCode::kExhausted,
                "verbs: queue pair of " + std::to_string(send_depth_ + 1) + " sends and " +
                    std::to_string(receive_depth_) + " receives on " + device_->describe(),
                errno);
  }
  return {api, qp, nullptr, send_depth_, true};
}

void Endpoint::transition(const QueuePair& qp, ibv_qp_attr& attributes, int mask, const char* from,
                          const char* to) const {
  const int error = device_->api().modify_qp(qp.get(), &attributes, mask);
  if (error != 0) {
    throw Error(ErrorCode::kIo,
                "verbs: queue pair " + std::to_string(qp.number()) + " on " + device_->describe() +
                    " from " + from + " to " + to,
                error);
  }
}

void Endpoint::to_init(const QueuePair& qp) const {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_->port();
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  transition(qp, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
             "RESET", "INIT");
}

void Endpoint::to_ready_to_receive(const QueuePair& qp, const EndpointInfo& peer,
                                   size_t index) const {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(device_->mtu(), static_cast<ibv_mtu>(peer.mtu));
  attributes.dest_qp_num = peer.queue_pairs[index].number;
  attributes.rq_psn = peer.queue_pairs[index].psn;
  attributes.max_dest_rd_atomic = device_->rd_atomic_in();
  attributes.min_rnr_timer = device_->options().min_rnr_timer;
  attributes.ah_attr.port_num = device_->port();
  attributes.ah_attr.dlid = peer.lid;
  attributes.ah_attr.sl = static_cast<uint8_t>(service().service_level);
  if (device_->is_ethernet() || service().traffic_class != 0) {
    attributes.ah_attr.is_global = 1;
    memcpy(attributes.ah_attr.grh.dgid.raw, peer.gid, sizeof peer.gid);
    attributes.ah_attr.grh.sgid_index = device_->gid_index();
    attributes.ah_attr.grh.hop_limit = 64;
    attributes.ah_attr.grh.traffic_class = static_cast<uint8_t>(service().traffic_class);
  }
  transition(qp, attributes,
             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
             "INIT", "RTR");
}

void Endpoint::to_ready_to_send(const QueuePair& qp, const EndpointInfo& peer, size_t index) const {
  const VerbsOptions& options = device_->options();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = options.timeout;
  attributes.retry_cnt = options.retry_count;
  attributes.rnr_retry = options.rnr_retry;
  attributes.sq_psn = info_.queue_pairs[index].psn;
  attributes.max_rd_atomic = std::min(device_->rd_atomic_out(), peer.rd_atomic);
  transition(qp, attributes,
             IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                 IBV_QP_MAX_QP_RD_ATOMIC,
             "RTR", "RTS");
}

// What the device says it has, which is not always what it was told.
LinkAttributes Endpoint::applied(const QueuePair& qp, ibv_mtu mtu) const {
  ibv_qp_attr attributes{};
  ibv_qp_init_attr initial{};
  const bool known = device_->api().query_qp(qp.get(), &attributes,
                                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_TIMEOUT |
                                                 IBV_QP_RETRY_CNT | IBV_QP_MAX_QP_RD_ATOMIC,
                                             &initial) == 0;
  const auto value = [known](auto number) {
    return known ? std::to_string(static_cast<unsigned>(number)) : std::string("unknown");
  };
  return {
      {"backend", "verbs"},
      {"device", device_->name()},
      {"port", std::to_string(device_->port())},
      {"gid", gid_text(device_->gid())},
      {"gid_index", std::to_string(device_->gid_index())},
      {"class", std::string(traffic_class_name(info_.traffic_class))},
      {"service_level", value(attributes.ah_attr.sl)},
      {"traffic_class", value(attributes.ah_attr.grh.traffic_class)},
      {"mtu_bytes", std::to_string(mtu_bytes(mtu))},
      {"timeout", value(attributes.timeout)},
      {"retry_count", value(attributes.retry_cnt)},
      {"rd_atomic", value(attributes.max_rd_atomic)},
      {"state", known ? state_name(attributes.qp_state) : "unknown"},
      {"queue_pairs", std::to_string(queue_pairs_.size())},
      {"queue_pair", std::to_string(qp.number())},
      {"send_depth", std::to_string(send_depth_)},
      {"post_method", qp.uses_work_request_api() ? "ibv_wr" : "ibv_post_send"},
      {"thread_domain", device_->has_thread_domain() ? "yes" : "no"},
  };
}

std::unique_ptr<Link> Endpoint::connect(std::span<const uint8_t> peer_blob) {
  const EndpointInfo peer = parse_endpoint(peer_blob);
  if (queue_pairs_.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "verbs: this endpoint was connected already");
  }
  if (peer.traffic_class != info_.traffic_class ||
      peer.queue_pairs.size() != info_.queue_pairs.size()) {
    throw Error(ErrorCode::kMismatch,
                "verbs: peer " + peer.name + " offers " + std::to_string(peer.queue_pairs.size()) +
                    " queue pairs of class " + std::string(traffic_class_name(peer.traffic_class)) +
                    ", we have " + std::to_string(info_.queue_pairs.size()) + " of class " +
                    std::string(traffic_class_name(info_.traffic_class)));
  }
  for (size_t i = 0; i < queue_pairs_.size(); ++i) {
    to_ready_to_receive(queue_pairs_[i], peer, i);
    if (!queue_pairs_[i].post_receives(receive_depth_)) {
      throw Error(ErrorCode::kIo, "verbs: posting receives on " + device_->describe(), errno);
    }
    to_ready_to_send(queue_pairs_[i], peer, i);
  }
  VerbsLinkParts parts;
  parts.attributes =
      applied(queue_pairs_.front(), std::min(device_->mtu(), static_cast<ibv_mtu>(peer.mtu)));
  parts.device = device_;
  parts.local = regions_;
  parts.completions = std::move(completions_);
  parts.queue_pairs = std::move(queue_pairs_);
  parts.remote = peer.regions;
  parts.peer = peer.name;
  parts.peer_epoch = peer.epoch;
  parts.send_depth = send_depth_;
  parts.max_message_bytes = device_->max_message_bytes();
  return std::make_unique<VerbsLink>(std::move(parts));
}

}  // namespace kvtransfer
