#include "kvtransfer/work_ring.h"

#include <errno.h>
#include <string.h>

#include <algorithm>

namespace kvtransfer {

std::string_view work_status_name(WorkStatus status) noexcept {
  switch (status) {
    case WorkStatus::kSuccess:
      return "success";
    case WorkStatus::kFlushed:
      return "flushed";
    case WorkStatus::kLocalProtection:
      return "local protection error";
    case WorkStatus::kRemoteAccess:
      return "remote access error";
    case WorkStatus::kPeerLost:
      return "peer lost";
    case WorkStatus::kLinkError:
      return "link error";
  }
  return "unknown";
}

std::string_view traffic_class_name(TrafficClass traffic_class) noexcept {
  return traffic_class == TrafficClass::kKv ? "kv" : "model";
}

WorkRingCounters& WorkRingCounters::operator+=(const WorkRingCounters& other) noexcept {
  work_requests += other.work_requests;
  doorbells += other.doorbells;
  signalled += other.signalled;
  completions += other.completions;
  back_pressure += other.back_pressure;
  write_bytes += other.write_bytes;
  read_bytes += other.read_bytes;
  flushed += other.flushed;
  return *this;
}

WorkRing::WorkRing(Link& link, const WorkRingOptions& options)
    : link_(link),
      limits_(link.limits()),
      capacity_(std::max(options.capacity, 1u)),
      batch_(std::clamp(options.batch, 1u, limits_.send_depth)),
      // Half the depth: one signalled request is always on its way while the other half fills.
      signal_interval_(limits_.ordered ? std::clamp(options.signal_interval, 1u,
                                                    std::max(limits_.send_depth / 2, 1u))
                                       : 1),
      entries_(capacity_),
      list_(limits_.send_depth) {}

uint32_t WorkRing::entries_for(uint64_t bytes) const noexcept {
  return bytes == 0 ? 1 : static_cast<uint32_t>((bytes - 1) / limits_.max_message_bytes + 1);
}

bool WorkRing::post(const WorkRequest& request, uint64_t cookie) noexcept {
  const uint32_t pieces = entries_for(request.length);
  if (failed_ || pieces > free_entries()) return false;
  WorkRequest piece = request;
  uint64_t left = request.length;
  for (uint32_t i = 0; i < pieces; ++i) {
    const bool last = i + 1 == pieces;
    piece.length = std::min(left, limits_.max_message_bytes);
    // Only the last piece tells the peer: it comes after the others' bytes.
    piece.op = request.op == LinkOp::kWriteWithImmediate && !last ? LinkOp::kWrite : request.op;
    append(piece, cookie);
    piece.local_offset += piece.length;
    piece.remote_offset += piece.length;
    left -= piece.length;
  }
  if (tail_ - posted_ >= batch_) doorbell();
  return true;
}

void WorkRing::append(const WorkRequest& request, uint64_t cookie) noexcept {
  Entry& slot = entry(tail_);
  slot.request = request;
  slot.request.wr_id = tail_;
  slot.request.signalled = false;
  slot.cookie = cookie;
  slot.status = WorkStatus::kFlushed;
  slot.completed = false;
  ++tail_;
  ++counters_.work_requests;
  (request.op == LinkOp::kRead ? counters_.read_bytes : counters_.write_bytes) += request.length;
}

// Marks [posted_, end): every signal_interval-th request and the last.
void WorkRing::mark_signals(uint64_t end) noexcept {
  for (uint64_t sequence = posted_; sequence < end; ++sequence) {
    const bool signal = ++since_signal_ >= signal_interval_ || sequence + 1 == end;
    entry(sequence).request.signalled = signal;
    if (signal) since_signal_ = 0;
  }
}

bool WorkRing::doorbell() noexcept {
  while (!failed_ && posted_ < tail_) {
    const uint64_t in_queue = posted_ - done_;
    const uint64_t room = limits_.send_depth - std::min<uint64_t>(in_queue, limits_.send_depth);
    const uint64_t end = std::min(tail_, posted_ + room);
    if (end == posted_ || post_list(end) < end) {
      ++counters_.back_pressure;
      return failed_;
    }
  }
  return true;
}

// Hands [posted_, end) to the link with one doorbell; returns the sequence reached.
uint64_t WorkRing::post_list(uint64_t end) noexcept {
  mark_signals(end);
  const auto count = static_cast<size_t>(end - posted_);
  for (size_t i = 0; i < count; ++i) list_[i] = entry(posted_ + i).request;
  const PostResult result = link_.post({list_.data(), count});
  const size_t accepted = std::min(result.accepted, count);
  for (size_t i = 0; i < accepted; ++i) counters_.signalled += list_[i].signalled ? 1 : 0;
  if (accepted > 0) ++counters_.doorbells;
  posted_ += accepted;
  since_signal_ = 0;
  if (result.error != 0 && result.error != ENOMEM) {
    fail({ErrorCode::kPeerLost, result.error,
          "posting to " + link_.peer() + ": " + strerror(result.error)});
  } else if (accepted > 0 && accepted < count && !list_[accepted - 1].signalled) {
    // The accepted part ends unsignalled. Earlier signals of the interval or the requests that
    // follow will retire it; remember how far the last signal is back.
    while (since_signal_ < accepted && !list_[accepted - 1 - since_signal_].signalled) {
      ++since_signal_;
    }
  }
  return posted_;
}

void WorkRing::fail(Outcome why) noexcept {
  if (failed_) return;
  failed_ = true;
  failure_ = std::move(why);
  link_.fail();
}

Outcome WorkRing::describe(const Entry& bad, const WorkCompletion& completion) const {
  const WorkRequest& r = bad.request;
  const char* verb = r.op == LinkOp::kRead ? "read" : "write";
  std::string status(work_status_name(completion.status));
  if (*completion.detail != '\0') status += std::string(" [") + completion.detail + "]";
  return {ErrorCode::kPeerLost, 0,
          std::string(verb) + " " + std::to_string(r.wr_id) + " with peer " + link_.peer() + ": " +
              status + " (local region " + std::to_string(r.local_region) + " offset " +
              std::to_string(r.local_offset) + ", remote region " +
              std::to_string(r.remote_region) + " offset " + std::to_string(r.remote_offset) +
              ", " + std::to_string(r.length) + " bytes, vendor error " +
              std::to_string(completion.vendor_error) + ")"};
}

void WorkRing::complete(const WorkCompletion& completion) noexcept {
  const uint64_t sequence = completion.wr_id;
  if (sequence < done_ || sequence >= posted_) return;  // not ours, or told twice
  ++counters_.completions;
  Entry& slot = entry(sequence);
  slot.completed = true;
  slot.status = completion.status;
  if (completion.status != WorkStatus::kSuccess) {
    if (!failed_) fail(describe(slot, completion));
    return;
  }
  if (limits_.ordered) {
    for (uint64_t i = done_; i <= sequence; ++i) {
      if (entry(i).completed && entry(i).status != WorkStatus::kSuccess) break;
      entry(i).completed = true;
      entry(i).status = WorkStatus::kSuccess;
    }
  }
  while (done_ < posted_ && entry(done_).completed && entry(done_).status == WorkStatus::kSuccess) {
    ++done_;
  }
}

size_t WorkRing::poll(std::span<Retired> out) noexcept {
  WorkCompletion completions[64];
  for (size_t n; (n = link_.poll(completions)) > 0;) {
    for (size_t i = 0; i < n; ++i) complete(completions[i]);
  }
  if (!failed_ && link_.failed()) {
    fail({ErrorCode::kPeerLost, 0, "peer " + link_.peer() + " is gone"});
  }
  // After the drain nothing can touch memory any more: retire the rest with what is known of it.
  if (failed_ && link_.drained()) done_ = posted_ = tail_;
  size_t count = 0;
  while (count < out.size() && head_ < done_) {
    const Entry& slot = entry(head_);
    if (slot.status == WorkStatus::kFlushed) ++counters_.flushed;
    out[count++] = {slot.cookie, slot.status};
    ++head_;
  }
  return count;
}

}  // namespace kvtransfer
