// Link: one connection to a peer process that moves bytes between registered regions, one-sided.
//
// The contract below the WorkRing, with twins: `verbs` (RC queue pairs) and `shm` (the peer's
// region is mapped, the poster copies). The WorkRing batches, signals selectively and keeps the
// books; a Link only posts what it is given, with one doorbell a call.
//
// Thread safety: none; belongs to one progress thread.
// Invariants:
//  1. post() accepts a prefix of the list. Accepted requests complete in order on an `ordered`
//  link;
//     a signalled one raises exactly one completion, and so does any failed one.
//  2. An immediate is seen by the peer only after the bytes of all requests posted before it.
//  3. After a failure or fail(), every accepted request that had not completed completes as
//     kFlushed. Only when drained() may their buffers be reused.
//  4. Local and remote ranges are checked before a byte moves; a bad one is a failed completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtransfer/error.h"
#include "kvtransfer/memory_region.h"

namespace kvtransfer {

// What a transfer is for; maps to a service level (InfiniBand) or traffic class (RoCE) on `verbs`.
enum class TrafficClass : uint8_t { kKv, kModel };
constexpr size_t kNumTrafficClasses = 2;
std::string_view traffic_class_name(TrafficClass traffic_class) noexcept;

enum class LinkOp : uint8_t { kWrite, kRead, kWriteWithImmediate };

struct WorkRequest {
  LinkOp op = LinkOp::kWrite;
  bool signalled = false;
  uint16_t local_region = 0;   // index in our region table
  uint16_t remote_region = 0;  // index in the peer's
  uint32_t immediate = 0;
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  uint64_t wr_id = 0;
};

enum class WorkStatus : uint8_t {
  kSuccess,
  kFlushed,          // never ran: an earlier request failed or the link was taken down
  kLocalProtection,  // local range outside its region
  kRemoteAccess,     // remote range outside its region, or no such region
  kPeerLost,         // the peer is gone or stopped answering
  kLinkError,        // anything else the device reports; see the detail
};
std::string_view work_status_name(WorkStatus status) noexcept;

struct WorkCompletion {
  uint64_t wr_id;
  WorkStatus status;
  uint32_t vendor_error = 0;
  const char* detail = "";  // the device's own word for the status; lives for ever
};

struct PostResult {
  size_t accepted = 0;
  int error = 0;  // 0; ENOMEM: no room now, try the rest later; else the link is broken
};

// Name and value of what was really applied, for people: device, port, mtu, service_level ...
using LinkAttributes = std::vector<std::pair<std::string, std::string>>;

struct LinkLimits {
  uint32_t send_depth;         // work requests outstanding
  uint64_t max_message_bytes;  // the ring splits longer requests
  bool ordered;                // completions retire everything before them
};

class Link {
 public:
  virtual ~Link() = default;

  virtual std::string_view backend() const noexcept = 0;
  virtual const std::string& peer() const noexcept = 0;  // its name, for messages
  virtual uint64_t peer_epoch() const noexcept = 0;      // changes when the peer restarts
  virtual LinkLimits limits() const noexcept = 0;
  virtual uint64_t remote_region_bytes(uint16_t region) const noexcept = 0;
  virtual LinkAttributes attributes() const { return {}; }

  virtual PostResult post(std::span<const WorkRequest> list) noexcept = 0;
  virtual size_t poll(std::span<WorkCompletion> out) noexcept = 0;
  // Immediates the peer has sent, in arrival order.
  virtual size_t poll_immediates(std::span<uint32_t> out) noexcept = 0;

  // Takes the link down: what is outstanding flushes, nothing new is accepted.
  virtual void fail() noexcept = 0;
  virtual bool failed() const noexcept = 0;
  // No accepted request can touch memory any more and all completions were polled.
  virtual bool drained() const noexcept = 0;
  // Readable when poll() or poll_immediates() may have something or the peer went away; to be
  // relied on only after an arm() that returned true.
  virtual int event_fd() const noexcept = 0;
  // Asks for the next event. False: there is something already, poll instead of sleeping.
  virtual bool arm() noexcept { return true; }
};

}  // namespace kvtransfer
