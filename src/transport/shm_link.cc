#include "transport/shm_link.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

#include "base/copy.h"
#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

constexpr uint32_t kSendDepth = 256;

Mailbox& mailbox(const MemoryRegion& region) {
  return *reinterpret_cast<Mailbox*>(region.data());  // zero-filled memory is an empty mailbox
}

bool inside(uint64_t offset, uint64_t length, uint64_t bytes) {
  return offset <= bytes && length <= bytes - offset;
}

class ShmLink final : public Link {
 public:
  ShmLink(ShmPeer peer, std::vector<std::shared_ptr<MemoryRegion>> local)
      : peer_(std::move(peer)), local_(std::move(local)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    completions_.reserve(kSendDepth);
    watch(peer_.inbox_event.get());
    watch(peer_.socket.get());
  }

  std::string_view backend() const noexcept override { return "shm"; }
  const std::string& peer() const noexcept override { return peer_.name; }
  uint64_t peer_epoch() const noexcept override { return peer_.epoch; }
  LinkLimits limits() const noexcept override { return {kSendDepth, uint64_t{1} << 30, true}; }
  uint64_t remote_region_bytes(uint16_t region) const noexcept override {
    return region < peer_.regions.size() ? peer_.regions[region].bytes() : 0;
  }

  PostResult post(std::span<const WorkRequest> list) noexcept override {
    if (failed_) return {0, ECONNRESET};
    PostResult result;
    bool sent = false;
    for (const WorkRequest& request : list) {
      if (completions_.size() >= kSendDepth ||
          (request.op == LinkOp::kWriteWithImmediate && !outbox_has_room())) {
        result.error = failed_ ? ECONNRESET : ENOMEM;
        break;
      }
      const WorkStatus status = execute(request);
      ++result.accepted;
      if (request.signalled || status != WorkStatus::kSuccess) {
        completions_.push_back({request.wr_id, status});
      }
      if (status != WorkStatus::kSuccess) {
        fail();
        break;
      }
      sent |= request.op == LinkOp::kWriteWithImmediate;
    }
    if (sent) ring_peer();
    return result;
  }

  size_t poll(std::span<WorkCompletion> out) noexcept override {
    const size_t count = std::min(out.size(), completions_.size());
    std::copy_n(completions_.begin(), count, out.begin());
    completions_.erase(completions_.begin(), completions_.begin() + static_cast<long>(count));
    if (count == 0) check_peer();
    return count;
  }

  size_t poll_immediates(std::span<uint32_t> out) noexcept override {
    if (failed_) return 0;
    Mailbox& box = mailbox(peer_.inbox);
    // acquire pairs with the sender's release: the bytes written before the immediate are visible.
    uint64_t tail = box.tail.load(std::memory_order_acquire);
    if (tail == inbox_head_) {
      uint64_t count;
      [[maybe_unused]] const ssize_t n = read(peer_.inbox_event.get(), &count, sizeof count);
      tail = box.tail.load(std::memory_order_acquire);  // rung between the look and the read
    }
    if (tail - inbox_head_ > kMailboxSlots) {  // no honest peer does this
      fail();
      return 0;
    }
    size_t count = 0;
    while (count < out.size() && inbox_head_ != tail) {
      out[count++] = box.slots[inbox_head_++ % kMailboxSlots].load(std::memory_order_relaxed);
    }
    box.head.store(inbox_head_, std::memory_order_release);  // pairs with outbox_has_room()
    return count;
  }

  void fail() noexcept override { failed_ = true; }
  bool failed() const noexcept override { return failed_; }
  // Copies are synchronous: nothing is in flight once post() returned.
  bool drained() const noexcept override { return failed_ && completions_.empty(); }
  int event_fd() const noexcept override { return epoll_.get(); }

 private:
  void watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      throw Error(ErrorCode::kIo, "shm: epoll", errno);
    }
  }

  // The socket carries nothing after the handshake: readable means hang-up.
  void check_peer() noexcept {
    pollfd hangup{peer_.socket.get(), POLLIN | POLLRDHUP, 0};
    if (!failed_ && ::poll(&hangup, 1, 0) > 0) failed_ = true;
    if (failed_ && !unwatched_) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer_.socket.get(), nullptr);
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer_.inbox_event.get(), nullptr);
      unwatched_ = true;
    }
  }

  bool outbox_has_room() noexcept {
    const uint64_t head = mailbox(peer_.outbox).head.load(std::memory_order_acquire);
    const uint64_t waiting = outbox_tail_ - head;
    if (waiting > kMailboxSlots) fail();  // a head beyond our tail: not an honest peer
    return waiting < kMailboxSlots;
  }

  WorkStatus execute(const WorkRequest& r) noexcept {
    if (r.length > 0) {
      if (r.local_region >= local_.size() ||
          !inside(r.local_offset, r.length, local_[r.local_region]->bytes())) {
        return WorkStatus::kLocalProtection;
      }
      if (!inside(r.remote_offset, r.length, remote_region_bytes(r.remote_region))) {
        return WorkStatus::kRemoteAccess;
      }
      uint8_t* local = local_[r.local_region]->data() + r.local_offset;
      uint8_t* remote = peer_.regions[r.remote_region].data() + r.remote_offset;
      if (r.op == LinkOp::kRead) {
        copy_bytes(local, remote, r.length);
      } else {
        copy_bytes(remote, local, r.length);
      }
    }
    if (r.op == LinkOp::kWriteWithImmediate) {
      Mailbox& box = mailbox(peer_.outbox);
      box.slots[outbox_tail_ % kMailboxSlots].store(r.immediate, std::memory_order_relaxed);
      box.tail.store(++outbox_tail_, std::memory_order_release);  // pairs with poll_immediates()
    }
    return WorkStatus::kSuccess;
  }

  void ring_peer() noexcept {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(peer_.outbox_event.get(), &one, sizeof one);
  }

  ShmPeer peer_;
  std::vector<std::shared_ptr<MemoryRegion>> local_;
  Fd epoll_;
  std::vector<WorkCompletion> completions_;
  uint64_t inbox_head_ = 0;
  uint64_t outbox_tail_ = 0;
  bool failed_ = false;
  bool unwatched_ = false;
};

}  // namespace

std::unique_ptr<Link> make_shm_link(ShmPeer peer,
                                    std::vector<std::shared_ptr<MemoryRegion>> local_regions) {
  return std::make_unique<ShmLink>(std::move(peer), std::move(local_regions));
}

}  // namespace kvtransfer
