// WorkRing: the doorbell-batched ring of work requests above a Link.
//
// post() appends to a list; doorbell() makes the whole list visible to the link with as few posts
// as its send queue allows. Only every `signal_interval`-th request and the last of a doorbell are
// signalled; a completion retires everything before it on an ordered link.
//
// Thread safety: none; belongs to the progress thread of its link.
// Invariants (tested in tests/cpp/work_ring_test.cc against a scripted link):
//  1. At least one request per send-queue depth is signalled, so the queue can't fill up with
//     requests that never complete.
//  2. A request is in the books before the link sees it; a completion always finds it.
//  3. Every posted request is retired exactly once: as done, as the root cause, or as flushed.
//  4. ENOMEM from the link is back-pressure: the next doorbell goes on at exactly the request that
//     was refused. Any other refusal takes the link down.
//  5. The first bad completion is the root cause, described once (failure()); what follows it is
//     flushed. Nothing is retired as flushed before the link is drained: only then is memory safe.
//  6. post() and doorbell() allocate nothing, take no lock and never throw.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvtransfer/link.h"

namespace kvtransfer {

struct WorkRingOptions {
  uint32_t capacity = 4096;       // requests posted and not yet retired
  uint32_t batch = 32;            // post() rings by itself at so many unrung requests
  uint32_t signal_interval = 16;  // at most; lowered to half the send depth
};

struct WorkRingCounters {
  uint64_t work_requests = 0;
  uint64_t doorbells = 0;
  uint64_t signalled = 0;
  uint64_t completions = 0;
  uint64_t back_pressure = 0;  // doorbells that met a full queue
  uint64_t write_bytes = 0;
  uint64_t read_bytes = 0;
  uint64_t flushed = 0;

  WorkRingCounters& operator+=(const WorkRingCounters& other) noexcept;
};

// One retired request.
struct Retired {
  uint64_t cookie;  // the caller's
  WorkStatus status;
};

class WorkRing {
 public:
  WorkRing(Link& link, const WorkRingOptions& options = {});

  // Requests that could be posted now; a long message may count as several.
  uint32_t free_entries() const noexcept {
    return capacity_ - static_cast<uint32_t>(tail_ - head_);
  }
  uint32_t entries_for(uint64_t bytes) const noexcept;
  // Appends one request (split above the link's message limit: `cookie` is retired once per piece,
  // entries_for(length) times; an immediate goes with the last piece). False, and nothing appended,
  // when the ring has no room or the link has failed. `request.signalled` and `wr_id` are ours.
  bool post(const WorkRequest& request, uint64_t cookie) noexcept;
  // Rings for everything appended. False when back-pressure left some for the next call.
  bool doorbell() noexcept;
  // Takes completions and retires requests.
  size_t poll(std::span<Retired> out) noexcept;

  // Posted and not retired.
  uint64_t outstanding() const noexcept { return tail_ - head_; }
  bool failed() const noexcept { return failed_; }
  // The root cause, once failed(): work request, peer, regions, offsets, length, status.
  const Outcome& failure() const noexcept { return failure_; }
  const WorkRingCounters& counters() const noexcept { return counters_; }
  Link& link() noexcept { return link_; }
  // Takes the link down with `why` as root cause; outstanding requests retire after the drain.
  void fail(Outcome why) noexcept;

 private:
  struct Entry {
    WorkRequest request;
    uint64_t cookie = 0;
    WorkStatus status = WorkStatus::kFlushed;
    bool completed = false;
  };

  Entry& entry(uint64_t sequence) noexcept { return entries_[sequence % capacity_]; }
  void append(const WorkRequest& request, uint64_t cookie) noexcept;
  void mark_signals(uint64_t end) noexcept;
  uint64_t post_list(uint64_t end) noexcept;
  void complete(const WorkCompletion& completion) noexcept;
  Outcome describe(const Entry& bad, const WorkCompletion& completion) const;

  Link& link_;
  const LinkLimits limits_;
  const uint32_t capacity_;
  const uint32_t batch_;
  const uint32_t signal_interval_;
  std::vector<Entry> entries_;
  std::vector<WorkRequest> list_;  // what one post hands over
  // Sequence numbers: retired < head_ <= accepted by the link < posted_ <= appended < tail_.
  uint64_t head_ = 0;
  uint64_t done_ = 0;  // [head_, done_) completed and waits for poll() to hand it out
  uint64_t posted_ = 0;
  uint64_t tail_ = 0;
  uint32_t since_signal_ = 0;
  bool failed_ = false;
  Outcome failure_;
  WorkRingCounters counters_;
};

}  // namespace kvtransfer
