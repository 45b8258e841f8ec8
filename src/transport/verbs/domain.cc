#include "transport/verbs/domain.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, "verbs: " + what);
}

void check(const VerbsOptions& options) {
  for (size_t i = 0; i < options.classes.size(); ++i) {
    const ClassOfService& service = options.classes[i];
    const std::string name(traffic_class_name(static_cast<TrafficClass>(i)));
    require(service.service_level <= 15, "service level " + std::to_string(service.service_level) +
                                             " of class " + name + " is not in 0..15");
    require(service.traffic_class <= 255, "traffic class " + std::to_string(service.traffic_class) +
                                              " of class " + name + " is not in 0..255");
  }
  require(options.queue_pairs >= 1 && options.queue_pairs <= kMaxQueuePairs,
          std::to_string(options.queue_pairs) + " queue pairs; 1 to 16 are possible");
  require(options.send_depth >= 2 && options.receive_depth >= 64,
          "a send depth of at least 2 and a receive depth of at least 64 are needed");
  require(options.timeout <= 31 && options.retry_count <= 7 && options.rnr_retry <= 7 &&
              options.min_rnr_timer <= 31,
          "timeout and min_rnr_timer are in 0..31, retry_count and rnr_retry in 0..7");
}

}  // namespace

std::shared_ptr<VerbsDomain> VerbsDomain::open(const VerbsOptions& options,
                                               std::vector<std::shared_ptr<MemoryRegion>> regions,
                                               size_t exported, bool loopback) {
  check(options);
  require(regions.size() <= kMaxVerbsRegions && exported <= regions.size(),
          "at most 64 regions, and no more exported than there are");
  std::string why;
  const VerbsApi* api = VerbsApi::load(&why);
  if (api == nullptr) throw Error(ErrorCode::kUnsupported, "verbs: " + why);
  auto device = std::make_shared<VerbsDevice>(*api, options);
  const size_t reachable = loopback ? regions.size() : exported;
  auto table = std::make_shared<RegionTable>(*api, device->pd(), std::move(regions), reachable,
                                             options.relaxed_ordering);
  return std::make_shared<Domain>(std::move(device), std::move(table), exported, loopback);
}

std::unique_ptr<VerbsEndpoint> Domain::make_endpoint(TrafficClass traffic_class,
                                                     const std::string& name, uint64_t epoch) {
  return std::make_unique<Endpoint>(device_, regions_, traffic_class, name, epoch, exported_);
}

std::unique_ptr<Link> Domain::make_loopback() {
  require(loopback_, "a loopback link needs a domain opened for it");
  Endpoint self(device_, regions_, TrafficClass::kKv, "(loopback)", 0, regions_->size());
  return self.connect(self.blob());
}

VerbsRegion Domain::region(size_t index) const {
  require(index < regions_->size(), "no region " + std::to_string(index));
  return (*regions_)[index];
}

std::vector<std::pair<std::string, uint64_t>> Domain::hardware_counters() const {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path("/sys/class/infiniband") / device_->name() / "ports" /
                          std::to_string(device_->port()) / "hw_counters";
  std::vector<std::pair<std::string, uint64_t>> counters;
  std::error_code code;
  for (const auto& file : fs::directory_iterator(folder, code)) {
    std::ifstream in(file.path());
    uint64_t value;
    if (in >> value) counters.emplace_back(file.path().filename().string(), value);
  }
  std::sort(counters.begin(), counters.end());
  return counters;
}

std::unique_ptr<Link> adopt_queue_pair(AdoptedQueuePair adopted) {
  std::string why;
  const VerbsApi* api = VerbsApi::load(&why);
  if (api == nullptr) throw Error(ErrorCode::kUnsupported, "verbs: " + why);
  require(adopted.queue_pair != nullptr && adopted.send_depth >= 3,
          "adopting needs a queue pair with a send depth of at least 3");
  auto* qp = static_cast<ibv_qp*>(adopted.queue_pair);
  const size_t count = adopted.regions.size();
  VerbsLinkParts parts;
  parts.local =
      std::make_shared<RegionTable>(*api, qp->pd, std::move(adopted.regions), count, false);
  parts.completions.api = api;
  parts.completions.cq = qp->send_cq;
  parts.completions.owned = false;
  parts.send_depth = adopted.send_depth - 1;
  parts.queue_pairs.emplace_back(*api, qp, nullptr, parts.send_depth, false);
  parts.remote = std::move(adopted.remote);
  parts.peer = "adopted queue pair " + std::to_string(qp->qp_num);
  parts.max_message_bytes = uint64_t{8} << 20;
  parts.attributes = {{"backend", "verbs"}, {"queue_pair", std::to_string(qp->qp_num)}};
  return std::make_unique<VerbsLink>(std::move(parts));
}

}  // namespace kvtransfer
