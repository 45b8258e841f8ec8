// Verbs: RDMA queue pairs as Links.
//
// libibverbs is loaded at run time. A machine without it, without devices or without permission is
// an ordinary answer with a reason (verbs_devices), not an error; only opening a VerbsDomain
// throws.
//
// VerbsDomain: one opened device and port, one protection domain, one registration per region for
// its whole life. VerbsEndpoint: the queue pairs of one traffic class towards one peer, before they
// are connected; its blob is carried to the peer by any control channel.
//
// Thread safety: a domain may be used from any thread. An endpoint and its Link belong to one
// thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvtransfer/link.h"
#include "kvtransfer/memory_region.h"

namespace kvtransfer {

struct VerbsGid {
  uint32_t index;
  std::string gid;   // as an IPv6 address; RoCE v2 over IPv4 shows ::ffff:a.b.c.d
  std::string type;  // "IB", "RoCE v1", "RoCE v2"
};

struct VerbsPort {
  std::string device;
  uint8_t port = 1;
  std::string link_layer;  // "InfiniBand" or "Ethernet"
  std::string state;       // "active", "down", ...
  uint32_t mtu_bytes = 0;  // active path MTU
  std::vector<VerbsGid> gids;
};

// Every port of every device that can be opened, by name. When empty, `why` says what stands in the
// way.
std::vector<VerbsPort> verbs_devices(std::string* why = nullptr);

// Which of the two posting interfaces of libibverbs carries a list of work requests.
enum class PostMethod : uint8_t {
  kAuto,            // kWorkRequestApi where the device has it
  kPostSend,        // one chain for ibv_post_send
  kWorkRequestApi,  // ibv_wr_start .. ibv_wr_complete: all or nothing
};

struct ClassOfService {
  uint32_t service_level = 0;  // 0..15, InfiniBand
  uint32_t traffic_class = 0;  // 0..255, RoCE v2: DSCP << 2
};

struct VerbsOptions {
  std::string device;  // empty: the first with an active port
  uint8_t port = 1;
  std::optional<uint8_t> gid_index;  // default: RoCE v2 over IPv4, else RoCE v2, else 0
  uint32_t path_mtu_bytes = 0;       // 0: the port's; the lower of both peers' counts
  uint8_t timeout = 14;              // 4.096 us * 2^timeout until a packet is sent again
  uint8_t retry_count = 7;
  uint8_t rnr_retry = 7;       // 7: for ever; the operation's own deadline bounds it
  uint8_t min_rnr_timer = 12;  // 0.64 ms
  uint8_t rd_atomic = 16;      // RDMA reads in flight per queue pair, at most what the device has
  uint32_t send_depth = 256;
  uint32_t receive_depth = 512;  // immediates that may arrive before we look
  uint32_t queue_pairs = 1;      // per peer and traffic class; more stripe the requests
  PostMethod post_method = PostMethod::kAuto;
  bool relaxed_ordering = false;  // opt-in: needed beyond 200 Gb/s on some hosts
  std::array<ClassOfService, kNumTrafficClasses> classes = {};  // by TrafficClass
};

// Keys of one registered region, for peers that post with raw addresses.
struct VerbsRegion {
  uint64_t address;
  uint64_t bytes;
  uint32_t local_key;
  uint32_t remote_key;
};

class VerbsEndpoint;

class VerbsDomain : public std::enable_shared_from_this<VerbsDomain> {
 public:
  // Opens the device and registers `regions`; peers are told of the first `exported` of them. With
  // `loopback` the others can be written through the NIC too, under keys that stay with us. Throws
  // Error(kUnsupported) without a usable device, Error(kInvalidArgument) for options out of range,
  // Error(kExhausted) when a registration is refused (memlock).
  static std::shared_ptr<VerbsDomain> open(const VerbsOptions& options,
                                           std::vector<std::shared_ptr<MemoryRegion>> regions,
                                           size_t exported, bool loopback = false);
  virtual ~VerbsDomain() = default;

  // New queue pairs in INIT. `name` and `epoch` are what the peer will know us by.
  virtual std::unique_ptr<VerbsEndpoint> make_endpoint(TrafficClass traffic_class,
                                                       const std::string& name, uint64_t epoch) = 0;
  // A link whose far side is this domain itself: writes go through the NIC from any of our regions
  // to any other (the paper's CNIC-assisted copy). Throws Error(kInvalidArgument) for a domain that
  // was not opened with `loopback`.
  virtual std::unique_ptr<Link> make_loopback() = 0;

  virtual VerbsRegion region(size_t index) const = 0;
  // Registers device memory behind a dma-buf descriptor for as long as the domain lives. Throws
  // Error(kUnsupported) where device or kernel can't.
  virtual VerbsRegion register_dmabuf(int fd, uint64_t offset, uint64_t bytes) = 0;
  // The port's hardware counters as the kernel shows them (retransmissions, errors ...).
  virtual std::vector<std::pair<std::string, uint64_t>> hardware_counters() const = 0;
};

class VerbsEndpoint {
 public:
  virtual ~VerbsEndpoint() = default;
  // Layout: docs/wire_format.md. At most kMaxBlobBytes.
  static constexpr size_t kMaxBlobBytes = 4096;
  virtual std::vector<uint8_t> blob() const = 0;
  // Moves the queue pairs to RTR and RTS towards the endpoint that `peer` describes. Call once.
  // Throws Error(kMismatch) for a blob of another version, class or damaged, Error(kIo) naming
  // device, port, GID and both states for a refused transition.
  virtual std::unique_ptr<Link> connect(std::span<const uint8_t> peer) = 0;
};

// A link over a queue pair that somebody else (pyverbs) has created and connected: posts to it and
// polls its send completion queue, which must be ours alone meanwhile. `queue_pair` is an ibv_qp*;
// the queue pair, its protection domain and device must outlive the link.
struct AdoptedQueuePair {
  void* queue_pair = nullptr;
  uint32_t send_depth = 0;  // of the queue pair; one entry is kept for the drain
  std::vector<std::shared_ptr<MemoryRegion>> regions;  // registered with its protection domain
  std::vector<VerbsRegion> remote;                     // the peer's
};
std::unique_ptr<Link> adopt_queue_pair(AdoptedQueuePair adopted);

}  // namespace kvtransfer
