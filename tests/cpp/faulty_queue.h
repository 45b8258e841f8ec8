// An IoQueue that fails on command, around a real one.
#pragma once

#include <functional>
#include <vector>

#include "wrapped_queue.h"

namespace kvtransfer::testing {

class FaultyQueue final : public WrappedQueue {
 public:
  // `fault` returns 0 to let an operation run, or the negative errno it ends with.
  explicit FaultyQueue(std::function<int(const IoRequest&)> fault)
      : WrappedQueue({.backend = IoBackend::kThreads, .depth = 16}), fault_(std::move(fault)) {}

  bool prepare(const IoRequest& request) noexcept override {
    const int error = fault_(request);
    if (error == 0) return inner_->prepare(request);
    failed_.push_back({request.user_data, error});
    return true;
  }
  size_t poll(std::span<IoCompletion> out) noexcept override {
    if (failed_.empty()) return inner_->poll(out);
    out[0] = failed_.back();
    failed_.pop_back();
    return 1;
  }
  void wait(std::span<const int> fds, int64_t deadline_ns) noexcept override {
    if (failed_.empty()) inner_->wait(fds, deadline_ns);
  }
  uint32_t in_flight() const noexcept override {
    return inner_->in_flight() + static_cast<uint32_t>(failed_.size());
  }

 private:
  std::function<int(const IoRequest&)> fault_;
  std::vector<IoCompletion> failed_;
};

}  // namespace kvtransfer::testing
