// A Link that does what a script says: accepts parts of lists, completes late, out of order or with
// errors. Records every post.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "kvtransfer/link.h"

namespace kvtransfer::testing {

class ScriptedLink final : public Link {
 public:
  explicit ScriptedLink(LinkLimits limits) : limits_(limits) {}

  // --- the script ---
  std::deque<PostResult> answers;  // for the next posts; empty: accept all
  std::vector<std::vector<WorkRequest>> posts;
  std::vector<WorkRequest> accepted;  // not completed yet
  std::deque<uint32_t> immediates;    // for the next poll_immediates()
  bool drain_allowed = true;
  bool quiet = true;  // the answer of arm()
  size_t armed = 0;
  LinkAttributes told;

  // Completes the first `count` accepted requests as hardware would: signalled ones say so.
  void complete(size_t count) {
    for (size_t i = 0; i < count && !accepted.empty(); ++i) {
      if (accepted.front().signalled)
        ready_.push_back({accepted.front().wr_id, WorkStatus::kSuccess});
      accepted.erase(accepted.begin());
    }
  }
  // The request at `index` fails; earlier ones succeed silently, later ones flush.
  void break_at(size_t index, WorkStatus status, uint32_t vendor) {
    complete(index);
    ready_.push_back({accepted.front().wr_id, status, vendor});
    accepted.erase(accepted.begin());
    fail();
  }
  void say(WorkCompletion completion) { ready_.push_back(completion); }

  // --- Link ---
  std::string_view backend() const noexcept override { return "scripted"; }
  const std::string& peer() const noexcept override { return peer_; }
  uint64_t peer_epoch() const noexcept override { return 1; }
  LinkLimits limits() const noexcept override { return limits_; }
  uint64_t remote_region_bytes(uint16_t) const noexcept override { return 1 << 30; }
  PostResult post(std::span<const WorkRequest> list) noexcept override {
    PostResult result{list.size(), 0};
    if (!answers.empty()) {
      result = answers.front();
      answers.pop_front();
    }
    result.accepted = std::min(result.accepted, list.size());
    posts.emplace_back(list.begin(), list.begin() + static_cast<long>(result.accepted));
    accepted.insert(accepted.end(), list.begin(),
                    list.begin() + static_cast<long>(result.accepted));
    outstanding_peak = std::max(outstanding_peak, accepted.size());
    return result;
  }
  size_t poll(std::span<WorkCompletion> out) noexcept override {
    const size_t n = std::min(out.size(), ready_.size());
    std::copy_n(ready_.begin(), n, out.begin());
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<long>(n));
    return n;
  }
  size_t poll_immediates(std::span<uint32_t> out) noexcept override {
    const size_t n = std::min(out.size(), immediates.size());
    std::copy_n(immediates.begin(), n, out.begin());
    immediates.erase(immediates.begin(), immediates.begin() + static_cast<long>(n));
    return n;
  }
  void fail() noexcept override {
    failed_ = true;
    for (const WorkRequest& r : accepted) ready_.push_back({r.wr_id, WorkStatus::kFlushed});
    accepted.clear();
  }
  bool failed() const noexcept override { return failed_; }
  bool drained() const noexcept override { return failed_ && ready_.empty() && drain_allowed; }
  int event_fd() const noexcept override { return -1; }
  bool arm() noexcept override {
    ++armed;
    return quiet;
  }
  LinkAttributes attributes() const override { return told; }

  size_t outstanding_peak = 0;

 private:
  LinkLimits limits_;
  std::string peer_ = "scripted-peer";
  std::deque<WorkCompletion> ready_;
  bool failed_ = false;
};

}  // namespace kvtransfer::testing
