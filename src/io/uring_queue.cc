#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "base/fd.h"
#include "io/io_slots.h"
#include "io/twins.h"
#include "io/wait.h"

namespace kvtransfer {

namespace {

// Newer kernels have these; older headers may not. Tried in this order, dropped one at a time.
constexpr unsigned kWantedFlags[] = {
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,  // 6.1
    IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,    // 5.19
    IORING_SETUP_SUBMIT_ALL,                                  // 5.18
};
constexpr std::pair<unsigned, const char*> kFlagNames[] = {
    {IORING_SETUP_SINGLE_ISSUER, "single_issuer"},
    {IORING_SETUP_DEFER_TASKRUN, "defer_taskrun"},
    {IORING_SETUP_COOP_TASKRUN, "coop_taskrun"},
    {IORING_SETUP_SUBMIT_ALL, "submit_all"},
};
// Of the request that watches wait()'s descriptor: no slot has it.
constexpr uint64_t kWakeTag = UINT64_MAX;
// The kernel pins at most this much per registered buffer.
constexpr size_t kMaxRegisteredBytes = size_t{1} << 30;

int init_ring(io_uring& ring, unsigned depth, unsigned& flags) {
  flags = 0;
  for (const unsigned flag : kWantedFlags) flags |= flag;
  for (size_t dropped = 0;; ++dropped) {
    io_uring_params params{};
    // R_DISABLED: the ring belongs to the thread that enables it, its first submitter, not to the
    // thread that happens to construct it.
    params.flags =
        flags | ((flags & IORING_SETUP_SINGLE_ISSUER) != 0 ? IORING_SETUP_R_DISABLED : 0);
    const int rc = io_uring_queue_init_params(depth + 1, &ring, &params);  // and one for wait()
    if (rc != -EINVAL || dropped == std::size(kWantedFlags)) return rc;
    flags &= ~kWantedFlags[dropped];
  }
}

std::string denied_text(int rc) {
  std::string text = std::string("io_uring_setup: ") + strerror(-rc);
  if (rc == -EPERM) return text + " (denied by seccomp or sysctl kernel.io_uring_disabled)";
  if (rc == -ENOMEM) return text + " (raise ulimit -l)";
  return text;
}

// mkdirat came last of what we need (5.15).
bool has_operations(io_uring& ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  const bool has = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_MKDIRAT) != 0;
  io_uring_free_probe(probe);
  return has;
}

class UringQueue final : public IoQueue {
 public:
  UringQueue(io_uring ring, unsigned flags, uint32_t depth)
      : ring_(ring), flags_(flags), slots_(depth) {
    // Polling the ring's own descriptor misses completions of deferred task work: they are posted
    // only when this thread enters the kernel. The registered eventfd is rung when such work is
    // added.
    io_uring_register_eventfd(&ring_, event_.get());
    disabled_ = (flags & IORING_SETUP_SINGLE_ISSUER) != 0;
  }

  ~UringQueue() override {
    enable();
    while (slots_.in_flight() > 0) {
      const int rc = io_uring_submit_and_wait(&ring_, 1);
      if (rc < 0 && rc != -EINTR)
        break;  // not the owner thread: closing the ring cancels and waits
      IoCompletion ignored[16];
      poll(ignored);
    }
    io_uring_queue_exit(&ring_);
  }

  std::string features() const override {
    std::string text;
    for (const auto& [flag, name] : kFlagNames) {
      if ((flags_ & flag) == 0) continue;
      if (!text.empty()) text += ' ';
      text += name;
    }
    return text;
  }

  void register_buffers(std::span<const IoBuffer> buffers) {
    std::vector<iovec> chunks;
    for (const IoBuffer& buffer : buffers) {
      for (size_t at = 0; at < buffer.bytes; at += kMaxRegisteredBytes) {
        chunks.push_back({static_cast<uint8_t*>(buffer.data) + at,
                          std::min(kMaxRegisteredBytes, buffer.bytes - at)});
      }
    }
    if (chunks.empty()) return;
    const int rc =
        io_uring_register_buffers(&ring_, chunks.data(), static_cast<unsigned>(chunks.size()));
    if (rc == 0) {
      registered_ = std::move(chunks);
    } else {
      fallback_reason_ = std::string("buffers not registered: ") + strerror(-rc) +
                         " (raise ulimit -l); plain reads into the same buffers";
    }
  }

  bool prepare(const IoRequest& request) noexcept override {
    if (slots_.full()) return false;
    enqueue(slots_.claim(request));
    return true;
  }

  void submit() noexcept override {
    enable();
    while (io_uring_sq_ready(&ring_) > 0) {
      const int rc = io_uring_submit(&ring_);
      if (rc < 0 && rc != -EINTR) break;  // EAGAIN/EBUSY: stays queued, the next call tries again
    }
  }

  size_t poll(std::span<IoCompletion> out) noexcept override {
    if (slots_.in_flight() == 0 && watched_ < 0) return 0;
    size_t count = 0;
    io_uring_cqe* cqe;
    bool resubmit = false;
    // Enters the kernel only where it has flagged work that waits for it.
    while (count < out.size() && io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const uint64_t tag = cqe->user_data;
      const int64_t raw = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (tag == kWakeTag) watched_ = -1;
      IoSlot* slot = slots_.find(tag);
      if (slot == nullptr) continue;
      const auto index = static_cast<uint32_t>(tag);
      const IoStep step = advance(*slot, raw);
      if (step.finished) {
        out[count++] = {slot->request.user_data, step.result};
        slots_.release(index);
      } else {
        enqueue(index);
        resubmit = true;
      }
    }
    if (resubmit) submit();
    return count;
  }

  // With at most one descriptor to watch, all waiting is done in the ring. More may come and go,
  // and a request that watches one keeps it open, so then they are polled.
  void wait(std::span<const int> fds, int64_t deadline_ns) noexcept override {
    enable();
    const bool watchable = fds.empty() || watched_ < 0 || watched_ == fds[0];
    if (fds.size() > 1 || !watchable || (ring_.features & IORING_FEAT_EXT_ARG) == 0) {
      submit();
      if (io_uring_cq_ready(&ring_) > 0) return;
      if (wait_readable(event_.get(), fds, deadline_ns, scratch_)) {
        uint64_t rung;
        [[maybe_unused]] const ssize_t n = read(event_.get(), &rung, sizeof rung);
      }
      return;
    }
    if (!fds.empty() && watched_ < 0) {
      io_uring_sqe* entry = next_entry();
      io_uring_prep_poll_add(entry, fds[0], POLLIN);
      io_uring_sqe_set_data64(entry, kWakeTag);
      watched_ = fds[0];
    }
    __kernel_timespec timeout{};
    if (deadline_ns != kNoDeadline) {
      const timespec left = time_left(deadline_ns);
      timeout = {left.tv_sec, left.tv_nsec};
    }
    io_uring_cqe* ignored;
    io_uring_submit_and_wait_timeout(&ring_, &ignored, 1,
                                     deadline_ns == kNoDeadline ? nullptr : &timeout, nullptr);
  }

  uint32_t in_flight() const noexcept override { return slots_.in_flight(); }
  uint32_t depth() const noexcept override { return slots_.depth(); }
  std::string_view backend() const noexcept override { return "uring"; }
  bool buffers_registered() const noexcept override { return !registered_.empty(); }

 private:
  void enable() noexcept {
    if (disabled_) {
      io_uring_enable_rings(&ring_);
      disabled_ = false;
    }
  }

  // The submission queue has one entry per slot, so an entry is always free after a submit.
  io_uring_sqe* next_entry() noexcept {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    while (entry == nullptr) {
      submit();
      entry = io_uring_get_sqe(&ring_);
    }
    return entry;
  }

  void enqueue(uint32_t index) noexcept {
    io_uring_sqe* entry = next_entry();
    fill(*entry, slots_[index]);
    io_uring_sqe_set_data64(entry, slots_.tag(index));
  }

  void fill(io_uring_sqe& entry, const IoSlot& slot) noexcept {
    const IoRequest& r = slot.request;
    switch (r.op) {
      case IoOp::kRead:
      case IoOp::kWrite:
        return fill_transfer(entry, slot);
      case IoOp::kOpen:
        return io_uring_prep_openat(&entry, AT_FDCWD, r.path, r.flags, 0644);
      case IoOp::kSync:
        return io_uring_prep_fsync(&entry, r.fd, 0);
      case IoOp::kRename:
        return io_uring_prep_renameat(&entry, AT_FDCWD, r.path, AT_FDCWD, r.new_path,
                                      static_cast<unsigned>(r.flags));
      case IoOp::kClose:
        return io_uring_prep_close(&entry, r.fd);
      case IoOp::kMakeDirectory:
        return io_uring_prep_mkdirat(&entry, AT_FDCWD, r.path, 0755);
      case IoOp::kUnlink:
        return io_uring_prep_unlinkat(&entry, AT_FDCWD, r.path, 0);
    }
  }

  void fill_transfer(io_uring_sqe& entry, const IoSlot& slot) noexcept {
    const IoRequest& r = slot.request;
    auto* at = static_cast<uint8_t*>(r.buffer) + slot.done;
    const auto length = static_cast<unsigned>(std::min(r.length - slot.done, kMaxTransferBytes));
    const uint64_t offset = r.offset + slot.done;
    const int fixed = registered_index(at, length);
    if (r.op == IoOp::kRead) {
      if (fixed >= 0) {
        io_uring_prep_read_fixed(&entry, r.fd, at, length, offset, fixed);
      } else {
        io_uring_prep_read(&entry, r.fd, at, length, offset);
      }
    } else if (fixed >= 0) {
      io_uring_prep_write_fixed(&entry, r.fd, at, length, offset, fixed);
    } else {
      io_uring_prep_write(&entry, r.fd, at, length, offset);
    }
  }

  // The registered buffer that contains the range, or -1 (also for a range across two chunks).
  int registered_index(const uint8_t* at, size_t length) const noexcept {
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto* begin = static_cast<const uint8_t*>(registered_[i].iov_base);
      if (at >= begin && at + length <= begin + registered_[i].iov_len) return static_cast<int>(i);
    }
    return -1;
  }

  io_uring ring_;
  const unsigned flags_;
  Fd event_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  IoSlots slots_;
  std::vector<iovec> registered_;
  std::vector<pollfd> scratch_;
  int watched_ = -1;  // the descriptor wait() has a request for
  bool disabled_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_uring_queue(const IoOptions& options,
                                          std::span<const IoBuffer> buffers, std::string& reason) {
  io_uring ring;
  unsigned flags;
  const int rc = init_ring(ring, options.depth, flags);
  if (rc != 0) {
    reason = denied_text(rc);
    return nullptr;
  }
  if (!has_operations(ring)) {
    io_uring_queue_exit(&ring);
    reason = "io_uring of this kernel has no mkdirat (Linux 5.15)";
    return nullptr;
  }
  auto queue = std::make_unique<UringQueue>(ring, flags, options.depth);
  queue->register_buffers(buffers);
  return queue;
}

}  // namespace kvtransfer
