// An IoQueue around a real one, for tests that change what some operations do.
#pragma once

#include <memory>

#include "kvtransfer/io_queue.h"

namespace kvtransfer::testing {

class WrappedQueue : public IoQueue {
 public:
  explicit WrappedQueue(const IoOptions& options) : inner_(IoQueue::create(options)) {}

  bool prepare(const IoRequest& request) noexcept override { return inner_->prepare(request); }
  void submit() noexcept override { inner_->submit(); }
  size_t poll(std::span<IoCompletion> out) noexcept override { return inner_->poll(out); }
  void wait(std::span<const int> fds, int64_t deadline_ns) noexcept override {
    inner_->wait(fds, deadline_ns);
  }
  uint32_t in_flight() const noexcept override { return inner_->in_flight(); }
  uint32_t depth() const noexcept override { return inner_->depth(); }
  std::string_view backend() const noexcept override { return "wrapped"; }
  bool buffers_registered() const noexcept override { return false; }

 protected:
  std::unique_ptr<IoQueue> inner_;
};

}  // namespace kvtransfer::testing
