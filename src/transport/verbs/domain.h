// Domain and Endpoint: the implementations behind VerbsDomain and VerbsEndpoint.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/verbs/device.h"
#include "transport/verbs/endpoint_blob.h"
#include "transport/verbs/verbs_link.h"

namespace kvtransfer {

class Domain final : public VerbsDomain {
 public:
  Domain(std::shared_ptr<VerbsDevice> device, std::shared_ptr<RegionTable> regions, size_t exported,
         bool loopback)
      : device_(std::move(device)),
        regions_(std::move(regions)),
        exported_(exported),
        loopback_(loopback) {}

  std::unique_ptr<VerbsEndpoint> make_endpoint(TrafficClass traffic_class, const std::string& name,
                                               uint64_t epoch) override;
  std::unique_ptr<Link> make_loopback() override;
  VerbsRegion region(size_t index) const override;
  VerbsRegion register_dmabuf(int fd, uint64_t offset, uint64_t bytes) override {
    return regions_->register_dmabuf(fd, offset, bytes);
  }
  std::vector<std::pair<std::string, uint64_t>> hardware_counters() const override;
  const VerbsDevice& device() const noexcept { return *device_; }

 private:
  std::shared_ptr<VerbsDevice> device_;  // outlives the registrations
  std::shared_ptr<RegionTable> regions_;
  size_t exported_;
  bool loopback_;
};

class Endpoint final : public VerbsEndpoint {
 public:
  Endpoint(std::shared_ptr<VerbsDevice> device, std::shared_ptr<RegionTable> regions,
           TrafficClass traffic_class, const std::string& name, uint64_t epoch,
           size_t announced_regions);

  std::vector<uint8_t> blob() const override { return pack_endpoint(info_); }
  std::unique_ptr<Link> connect(std::span<const uint8_t> peer) override;

 private:
  const ClassOfService& service() const noexcept;
  void create_completion_queue();
  QueuePair create_queue_pair();
  void to_init(const QueuePair& qp) const;
  void to_ready_to_receive(const QueuePair& qp, const EndpointInfo& peer, size_t index) const;
  void to_ready_to_send(const QueuePair& qp, const EndpointInfo& peer, size_t index) const;
  void transition(const QueuePair& qp, ibv_qp_attr& attributes, int mask, const char* from,
                  const char* to) const;
  LinkAttributes applied(const QueuePair& qp, ibv_mtu mtu) const;

  std::shared_ptr<VerbsDevice> device_;
  std::shared_ptr<RegionTable> regions_;
  EndpointInfo info_;
  uint32_t send_depth_;
  uint32_t receive_depth_;
  PostMethod method_;
  CompletionQueue completions_;
  std::vector<QueuePair> queue_pairs_;
};

}  // namespace kvtransfer
