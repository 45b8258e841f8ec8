// VerbsLink: one or more connected RC queue pairs towards one peer, as a Link.
//
// With one queue pair the link is ordered and signals selectively. With several (striping) requests
// go to the queue pair with the least outstanding, each is signalled, and an immediate travels on
// every one of them behind that stripe's bytes: the peer hands it on when all copies have come.
//
// Thread safety: none; belongs to one progress thread.
// Invariants, beside those of Link:
//  1. The completion queue holds a completion of every request and receive at once.
//  2. drained() comes after every queue pair's drain marker (or its destruction), never by time.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "kvtransfer/link.h"
#include "transport/verbs/queue_pair.h"

namespace kvtransfer {

class VerbsDevice;

// A completion queue with its event channel; both null-safe to move.
struct CompletionQueue {
  const VerbsApi* api = nullptr;
  ibv_comp_channel* channel = nullptr;  // null for an adopted queue: polled only
  ibv_cq* cq = nullptr;
  bool owned = true;

  CompletionQueue() = default;
  CompletionQueue(CompletionQueue&& other) noexcept { swap(other); }
  CompletionQueue& operator=(CompletionQueue&& other) noexcept {
    swap(other);
    return *this;
  }
  ~CompletionQueue();
  void swap(CompletionQueue& other) noexcept;
};

// In this order, so that they go in the other: queue pairs before their completion queue, that
// before the registrations, those before the device.
struct VerbsLinkParts {
  std::shared_ptr<VerbsDevice> device;  // null when adopted
  std::shared_ptr<RegionTable> local;
  CompletionQueue completions;
  std::vector<QueuePair> queue_pairs;
  std::vector<VerbsRegion> remote;
  std::string peer;
  uint64_t peer_epoch = 0;
  uint32_t send_depth = 0;  // per queue pair
  uint64_t max_message_bytes = 0;
  LinkAttributes attributes;
};

class VerbsLink final : public Link {
 public:
  explicit VerbsLink(VerbsLinkParts parts);

  // The channel the endpoints were exchanged over: its hang-up tells of the peer's death at once.
  void watch(Fd control);

  std::string_view backend() const noexcept override { return "verbs"; }
  const std::string& peer() const noexcept override { return parts_.peer; }
  uint64_t peer_epoch() const noexcept override { return parts_.peer_epoch; }
  LinkLimits limits() const noexcept override;
  uint64_t remote_region_bytes(uint16_t region) const noexcept override {
    return region < parts_.remote.size() ? parts_.remote[region].bytes : 0;
  }
  LinkAttributes attributes() const override { return parts_.attributes; }

  PostResult post(std::span<const WorkRequest> list) noexcept override;
  size_t poll(std::span<WorkCompletion> out) noexcept override;
  size_t poll_immediates(std::span<uint32_t> out) noexcept override;
  void fail() noexcept override;
  bool failed() const noexcept override { return failed_; }
  bool drained() const noexcept override;
  int event_fd() const noexcept override { return epoll_.get(); }
  bool arm() noexcept override;

 private:
  struct Stripe {
    uint32_t outstanding = 0;  // requests accepted and not completed; counted when striping
    uint32_t used_receives = 0;
    uint64_t immediates = 0;  // arrived on this queue pair
    std::vector<WorkRequest> list;
  };

  PostResult post_striped(std::span<const WorkRequest> list) noexcept;
  size_t pick_stripe() const noexcept;
  bool all_have_room() const noexcept;
  void flush_stripes() noexcept;
  void take_completions() noexcept;
  void take(const ibv_wc& completion) noexcept;
  void take_receive(const ibv_wc& completion, size_t stripe) noexcept;
  void take_cq_event() noexcept;
  void check_peer(int64_t now) noexcept;
  void finish_drain() noexcept;
  uint64_t arrived_immediates() const noexcept;
  size_t index_of(uint32_t queue_pair_number) const noexcept;

  VerbsLinkParts parts_;
  std::vector<Stripe> stripes_;
  const bool striped_;
  Fd epoll_;
  Fd control_;
  std::vector<WorkCompletion> ready_;  // taken from the queue, not handed out yet
  size_t ready_head_ = 0;
  std::deque<uint32_t> immediates_;  // of the first stripe, not delivered yet
  uint64_t delivered_ = 0;
  bool armed_ = false;
  bool failed_ = false;
  int64_t failed_at_ns_ = 0;
  int64_t checked_at_ns_ = 0;
};

}  // namespace kvtransfer
