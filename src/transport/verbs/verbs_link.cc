#include "transport/verbs/verbs_link.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "kvtransfer/error.h"
#include "transport/verbs/device.h"

namespace kvtransfer {

namespace {

constexpr int64_t kPeerCheckNs = 1'000'000;
// A device that is gone flushes nothing; destroying its queue pairs is the proof then.
constexpr int64_t kDrainPatienceNs = 500'000'000;

WorkStatus status_of(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return WorkStatus::kSuccess;
    case IBV_WC_WR_FLUSH_ERR:
      return WorkStatus::kFlushed;
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return WorkStatus::kLocalProtection;
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_OP_ERR:
      return WorkStatus::kRemoteAccess;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_REM_ABORT_ERR:
      return WorkStatus::kPeerLost;
    default:
      return WorkStatus::kLinkError;
  }
}

}  // namespace

CompletionQueue::~CompletionQueue() {
  if (!owned || api == nullptr) return;
  if (cq != nullptr) api->destroy_cq(cq);
  if (channel != nullptr) api->destroy_comp_channel(channel);
}

void CompletionQueue::swap(CompletionQueue& other) noexcept {
  std::swap(api, other.api);
  std::swap(channel, other.channel);
  std::swap(cq, other.cq);
  std::swap(owned, other.owned);
}

VerbsLink::VerbsLink(VerbsLinkParts parts)
    : parts_(std::move(parts)),
      stripes_(parts_.queue_pairs.size()),
      striped_(parts_.queue_pairs.size() > 1),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  ready_.reserve(2 * size_t{parts_.send_depth} * stripes_.size() + 64);
  if (striped_) {
    for (Stripe& stripe : stripes_) stripe.list.reserve(parts_.send_depth);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  if (parts_.completions.channel != nullptr) {
    const int fd = parts_.completions.channel->fd;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }
  if (parts_.device) epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, parts_.device->event_fd(), &event);
}

void VerbsLink::watch(Fd control) {
  control_ = std::move(control);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, control_.get(), &event) != 0) {
    throw Error(ErrorCode::kIo, "verbs: epoll", errno);
  }
}

LinkLimits VerbsLink::limits() const noexcept {
  return {static_cast<uint32_t>(parts_.send_depth * stripes_.size()), parts_.max_message_bytes,
          !striped_};
}

// ------------------------------------------------------------------------------------ posting

PostResult VerbsLink::post(std::span<const WorkRequest> list) noexcept {
  if (failed_) return {0, ECONNRESET};
  if (striped_) return post_striped(list);
  return parts_.queue_pairs.front().post(list, *parts_.local, parts_.remote);
}

size_t VerbsLink::pick_stripe() const noexcept {
  const auto least = std::min_element(
      stripes_.begin(), stripes_.end(),
      [](const Stripe& a, const Stripe& b) { return a.outstanding < b.outstanding; });
  return static_cast<size_t>(least - stripes_.begin());
}

bool VerbsLink::all_have_room() const noexcept {
  return std::all_of(stripes_.begin(), stripes_.end(), [this](const Stripe& stripe) {
    return stripe.outstanding < parts_.send_depth;
  });
}

PostResult VerbsLink::post_striped(std::span<const WorkRequest> list) noexcept {
  PostResult result;
  for (const WorkRequest& request : list) {
    const bool tells = request.op == LinkOp::kWriteWithImmediate;
    const size_t target = pick_stripe();
    if (tells ? !all_have_room() : stripes_[target].outstanding >= parts_.send_depth) {
      result.error = ENOMEM;
      break;
    }
    stripes_[target].list.push_back(request);
    ++stripes_[target].outstanding;
    for (size_t i = 0; tells && i < stripes_.size(); ++i) {
      if (i == target) continue;
      WorkRequest carrier{.op = request.op, .signalled = true, .immediate = request.immediate};
      carrier.wr_id = kCarrierId;
      stripes_[i].list.push_back(carrier);
      ++stripes_[i].outstanding;
    }
    ++result.accepted;
  }
  flush_stripes();
  return result;
}

void VerbsLink::flush_stripes() noexcept {
  for (size_t i = 0; i < stripes_.size(); ++i) {
    Stripe& stripe = stripes_[i];
    if (stripe.list.empty()) continue;
    const PostResult posted = parts_.queue_pairs[i].post(stripe.list, *parts_.local, parts_.remote);
    // Room was counted before, so a refusal is a broken device. What wasn't accepted retires as
    // flushed after the drain, like everything else.
    if (posted.accepted < stripe.list.size()) fail();
    stripe.list.clear();
  }
}

// -------------------------------------------------------------------------------- completions

size_t VerbsLink::index_of(uint32_t queue_pair_number) const noexcept {
  for (size_t i = 0; i < parts_.queue_pairs.size(); ++i) {
    if (parts_.queue_pairs[i].number() == queue_pair_number) return i;
  }
  return 0;
}

void VerbsLink::take_receive(const ibv_wc& completion, size_t stripe) noexcept {
  if (completion.status != IBV_WC_SUCCESS) return;  // flushed with its queue pair
  Stripe& from = stripes_[stripe];
  ++from.immediates;
  if (stripe == 0) immediates_.push_back(ntohl(completion.imm_data));
  // In halves of 64: one call per so many, far before the peer runs out.
  if (++from.used_receives >= 32) {
    if (!parts_.queue_pairs[stripe].post_receives(from.used_receives)) fail();
    from.used_receives = 0;
  }
}

void VerbsLink::take(const ibv_wc& completion) noexcept {
  const size_t stripe = striped_ ? index_of(completion.qp_num) : 0;
  if ((completion.wr_id & kReceiveId) != 0) return take_receive(completion, stripe);
  if ((completion.wr_id & kDrainId) != 0) return parts_.queue_pairs[stripe].finish_drain();
  if (stripes_[stripe].outstanding > 0) --stripes_[stripe].outstanding;
  const WorkStatus status = status_of(completion.status);
  if ((completion.wr_id & kCarrierId) == 0) {
    const bool bad = status != WorkStatus::kSuccess;
    ready_.push_back({completion.wr_id, status, bad ? completion.vendor_err : 0,
                      bad ? parts_.completions.api->wc_status_str(completion.status) : ""});
  }
  if (status != WorkStatus::kSuccess) fail();
}

void VerbsLink::take_completions() noexcept {
  if (parts_.completions.cq == nullptr) return;
  ibv_wc completions[32];
  for (int n; (n = ibv_poll_cq(parts_.completions.cq, 32, completions)) > 0;) {
    for (int i = 0; i < n; ++i) take(completions[i]);
  }
}

void VerbsLink::take_cq_event() noexcept {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  while (parts_.completions.api->get_cq_event(parts_.completions.channel, &cq, &context) == 0) {
    parts_.completions.api->ack_cq_events(cq, 1);
    armed_ = false;
  }
}

size_t VerbsLink::poll(std::span<WorkCompletion> out) noexcept {
  if (armed_) take_cq_event();
  take_completions();
  if (ready_head_ == ready_.size()) {
    ready_.clear();
    ready_head_ = 0;
    check_peer(now_ns());
  }
  const size_t count = std::min(out.size(), ready_.size() - ready_head_);
  std::copy_n(ready_.begin() + static_cast<long>(ready_head_), count, out.begin());
  ready_head_ += count;
  return count;
}

// Every queue pair delivers in order, so the k-th immediate has come when each has brought k.
uint64_t VerbsLink::arrived_immediates() const noexcept {
  uint64_t arrived = stripes_[0].immediates;
  for (const Stripe& stripe : stripes_) arrived = std::min(arrived, stripe.immediates);
  return arrived;
}

size_t VerbsLink::poll_immediates(std::span<uint32_t> out) noexcept {
  const uint64_t arrived = arrived_immediates();
  size_t count = 0;
  while (count < out.size() && delivered_ < arrived) {
    out[count++] = immediates_.front();
    immediates_.pop_front();
    ++delivered_;
  }
  return count;
}

bool VerbsLink::arm() noexcept {
  if (parts_.completions.channel == nullptr) return true;
  if (failed_ && drained()) return true;
  if (!armed_) {
    if (ibv_req_notify_cq(parts_.completions.cq, 0) != 0) {
      fail();
      return false;
    }
    armed_ = true;
  }
  take_completions();  // what came before the notification was asked for raises no event
  return ready_head_ == ready_.size() && delivered_ == arrived_immediates();
}

// ------------------------------------------------------------------------------------ failure

void VerbsLink::fail() noexcept {
  if (failed_) return;
  failed_ = true;
  failed_at_ns_ = now_ns();
  for (QueuePair& qp : parts_.queue_pairs) qp.begin_drain();
}

bool VerbsLink::drained() const noexcept {
  return failed_ && ready_head_ == ready_.size() &&
         std::all_of(parts_.queue_pairs.begin(), parts_.queue_pairs.end(),
                     [](const QueuePair& qp) { return qp.drained(); });
}

void VerbsLink::check_peer(int64_t now) noexcept {
  if (failed_) return finish_drain();
  if (now - checked_at_ns_ < kPeerCheckNs) return;
  checked_at_ns_ = now;
  if (parts_.device) {
    parts_.device->poll_events();
    if (parts_.device->lost()) fail();
  }
  if (control_.valid()) {
    pollfd hangup{control_.get(), POLLIN | POLLRDHUP, 0};  // it carries nothing after the handshake
    if (::poll(&hangup, 1, 0) > 0) fail();
  }
}

void VerbsLink::finish_drain() noexcept {
  if (control_.valid()) control_.reset();
  const bool late = now_ns() - failed_at_ns_ > kDrainPatienceNs;
  for (QueuePair& qp : parts_.queue_pairs) {
    if (qp.drained() || late) qp.destroy();
  }
}

}  // namespace kvtransfer
