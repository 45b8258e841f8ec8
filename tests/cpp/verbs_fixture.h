// Two connected verbs endpoints in one process, each on a device of its own where there are two.
#pragma once

#include <cstring>

#include "kvtransfer/verbs.h"
#include "kvtransfer/work_ring.h"
#include "test_support.h"
#include "transport/verbs/endpoint_blob.h"

namespace kvtransfer::testing {

// The devices, or why there are none. Asked once.
inline const std::vector<VerbsPort>& devices(std::string* why = nullptr) {
  static std::string reason;
  static const std::vector<VerbsPort> ports = verbs_devices(&reason);
  if (why != nullptr) *why = reason;
  return ports;
}

#define KVT_NEED_VERBS()                                                            \
  do {                                                                              \
    std::string why;                                                                \
    if (testing::devices(&why).empty()) GTEST_SKIP() << "no verbs device: " << why; \
  } while (false)

inline VerbsOptions verbs_options(size_t engine) {
  VerbsOptions options;
  options.device = devices()[engine % devices().size()].device;
  return options;
}

inline std::shared_ptr<MemoryRegion> make_verbs_region(size_t bytes) {
  return std::make_shared<MemoryRegion>(bytes, RegionKind::kAnonymous, HugePages::kOff);
}

struct VerbsPair {
  // `tamper` may change what b tells a of itself.
  explicit VerbsPair(const VerbsOptions& for_a, const VerbsOptions& for_b, size_t bytes = 1 << 20,
                     const std::function<void(EndpointInfo&)>& tamper = {}, uint64_t epoch = 1)
      : here(make_verbs_region(bytes)),
        there(make_verbs_region(bytes)),
        domain_a(VerbsDomain::open(for_a, {here}, 1)),
        domain_b(VerbsDomain::open(for_b, {there}, 1)) {
    const auto end_a = domain_a->make_endpoint(TrafficClass::kKv, "a", epoch);
    const auto end_b = domain_b->make_endpoint(TrafficClass::kKv, "b", epoch);
    EndpointInfo told = parse_endpoint(end_b->blob());
    if (tamper) tamper(told);
    const auto blob_a = end_a->blob();
    b = end_b->connect(blob_a);
    a = end_a->connect(pack_endpoint(told));
    ring = std::make_unique<WorkRing>(*a);
  }
  explicit VerbsPair(size_t bytes = 1 << 20)
      : VerbsPair(verbs_options(0), verbs_options(1), bytes) {}

  static WorkRequest request(LinkOp op, uint64_t local, uint64_t remote, uint64_t length,
                             uint32_t immediate = 0) {
    WorkRequest out;
    out.op = op;
    out.local_offset = local;
    out.remote_offset = remote;
    out.length = length;
    out.immediate = immediate;
    return out;
  }
  // Retires everything that is outstanding, or stops at the deadline.
  std::vector<Retired> drain(double seconds = 20) {
    std::vector<Retired> all;
    Retired some[64];
    const int64_t deadline = in_seconds(seconds);
    while (ring->outstanding() > 0 && now_ns() < deadline) {
      ring->doorbell();
      const size_t n = ring->poll(some);
      all.insert(all.end(), some, some + n);
      WorkCompletion nothing[1];
      b->poll(nothing);
    }
    return all;
  }

  std::shared_ptr<MemoryRegion> here, there;
  std::shared_ptr<VerbsDomain> domain_a, domain_b;
  std::unique_ptr<Link> a, b;
  std::unique_ptr<WorkRing> ring;
};

// Tests that lose peers or take devices away: only in the virtual machine, where that can't hurt.
class BreakableDevices : public ::testing::Test {
 protected:
  void SetUp() override {
    KVT_NEED_VERBS();
    if (getenv("KVT_IN_VM") == nullptr) GTEST_SKIP() << "breaks devices: only in tests/vm/run.sh";
  }
  // Short enough that a lost peer is noticed within a test.
  static VerbsOptions quick(size_t engine) {
    VerbsOptions options = verbs_options(engine);
    options.timeout = 14;
    options.retry_count = 5;
    return options;
  }
};

}  // namespace kvtransfer::testing
