#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/notifier.h"
#include "io/io_slots.h"
#include "io/twins.h"
#include "io/wait.h"

namespace kvtransfer {

namespace {

int64_t result_of(int64_t rc) {
  return rc < 0 ? -int64_t{errno} : rc;
}

// One system call of the operation, from where `slot.done` stands.
int64_t run_once(const IoSlot& slot) noexcept {
  const IoRequest& r = slot.request;
  auto* at = static_cast<uint8_t*>(r.buffer) + slot.done;
  const size_t length = std::min(r.length - slot.done, kMaxTransferBytes);
  const auto offset = static_cast<off_t>(r.offset + slot.done);
  switch (r.op) {
    case IoOp::kRead:
      return result_of(pread(r.fd, at, length, offset));
    case IoOp::kWrite:
      return result_of(pwrite(r.fd, at, length, offset));
    case IoOp::kOpen:
      return result_of(open(r.path, r.flags, 0644));
    case IoOp::kSync:
      return result_of(fsync(r.fd));
    case IoOp::kRename:
      return result_of(syscall(SYS_renameat2, AT_FDCWD, r.path, AT_FDCWD, r.new_path,
                               static_cast<unsigned>(r.flags)));
    case IoOp::kClose:
      return result_of(close(r.fd));
    case IoOp::kMakeDirectory:
      return result_of(mkdir(r.path, 0755));
    case IoOp::kUnlink:
      return result_of(unlink(r.path));
  }
  return -EINVAL;
}

class ThreadQueue final : public IoQueue {
 public:
  ThreadQueue(const IoOptions& options, std::string reason) : slots_(options.depth) {
    fallback_reason_ = std::move(reason);
    prepared_.reserve(options.depth);
    for (uint32_t i = 0; i < options.num_threads; ++i) {
      workers_.emplace_back([this] { work(); });
    }
  }

  ~ThreadQueue() override {
    submit();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  bool prepare(const IoRequest& request) noexcept override {
    if (slots_.full()) return false;
    prepared_.push_back(slots_.claim(request));
    return true;
  }

  void submit() noexcept override {
    if (prepared_.empty()) return;
    {
      const std::lock_guard lock(mutex_);
      pending_.insert(pending_.end(), prepared_.begin(), prepared_.end());
    }
    prepared_.clear();
    wake_.notify_all();
  }

  size_t poll(std::span<IoCompletion> out) noexcept override {
    if (slots_.in_flight() == 0) return 0;
    const std::lock_guard lock(mutex_);
    const size_t count = std::min(out.size(), done_.size());
    for (size_t i = 0; i < count; ++i) {
      const auto [index, result] = done_.front();
      done_.pop_front();
      out[i] = {slots_[index].request.user_data, result};
      slots_.release(index);
    }
    return count;
  }

  void wait(std::span<const int> fds, int64_t deadline_ns) noexcept override {
    submit();
    done_event_.drain();  // before looking, so that a ring after it is not lost
    {
      const std::lock_guard lock(mutex_);
      if (!done_.empty()) return;
    }
    wait_readable(done_event_.fd(), fds, deadline_ns, scratch_);
  }

  uint32_t in_flight() const noexcept override { return slots_.in_flight(); }
  uint32_t depth() const noexcept override { return slots_.depth(); }
  std::string_view backend() const noexcept override { return "threads"; }
  bool buffers_registered() const noexcept override { return false; }

 private:
  struct Done {
    uint32_t index;
    int64_t result;
  };

  // A slot belongs to one worker from pending_ to done_; the mutex hands it over.
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
      if (pending_.empty()) return;
      const uint32_t index = pending_.front();
      pending_.pop_front();
      IoSlot& slot = slots_[index];
      lock.unlock();
      IoStep step{};
      while (!step.finished) step = advance(slot, run_once(slot));
      lock.lock();
      done_.push_back({index, step.result});
      done_event_.ring();
    }
  }

  IoSlots slots_;
  std::vector<uint32_t> prepared_;
  Notifier done_event_;
  std::vector<pollfd> scratch_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<uint32_t> pending_;  // guarded by mutex_
  std::deque<Done> done_;         // guarded by mutex_
  bool stopping_ = false;         // guarded by mutex_
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<IoQueue> make_thread_queue(const IoOptions& options, std::string fallback_reason) {
  return std::make_unique<ThreadQueue>(options, std::move(fallback_reason));
}

}  // namespace kvtransfer
