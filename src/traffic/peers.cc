#include "traffic/peers.h"

#include <chrono>

#include "base/clock.h"

namespace kvtransfer {

PeerId Peers::add(std::unique_ptr<Link> link) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_.emplace_back();
  peer.link = std::move(link);
  peer.ring = std::make_unique<WorkRing>(*peer.link);
  const auto id = static_cast<PeerId>(peers_.size() - 1);
  by_name_[peer.link->peer()] = id;
  changed_.notify_all();
  return id;
}

PeerId Peers::wait(const std::string& name, int64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto it = by_name_.find(name);
    if (it != by_name_.end() && !peers_[it->second].lost) return it->second;
    const int64_t left = deadline_ns - now_ns();
    if (left <= 0) throw Error(ErrorCode::kTimeout, "no peer named " + name + " has connected");
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(left, 1'000'000'000)));
  }
}

bool Peers::alive(PeerId peer) const {
  const std::lock_guard lock(mutex_);
  return peer < peers_.size() && !peers_[peer].lost;
}

uint32_t Peers::open_receive(std::shared_ptr<LayerStream> stream) {
  const std::lock_guard lock(mutex_);
  do {
    next_tag_ = (next_tag_ + 1) & kTagMask;
  } while (receives_.contains(next_tag_));
  receives_[next_tag_] = std::move(stream);
  return next_tag_;
}

void Peers::close_receive(uint32_t tag) {
  const std::lock_guard lock(mutex_);
  receives_.erase(tag);
}

WorkRingCounters Peers::counters() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

WorkRing* Peers::ring(PeerId peer) {
  const std::lock_guard lock(mutex_);
  return peer < peers_.size() ? peers_[peer].ring.get() : nullptr;
}

void Peers::deliver(uint32_t immediate) noexcept {
  std::shared_ptr<LayerStream> stream;
  {
    const std::lock_guard lock(mutex_);
    const auto it = receives_.find(immediate >> kLayerBits);
    if (it == receives_.end()) return;  // a receive that was closed: an old attempt's, dropped
    stream = it->second;
  }
  const uint32_t layer = immediate & kGaveUp;
  if (layer == kGaveUp) {
    stream->fail({ErrorCode::kCancelled, 0, "the peer gave this transfer up"});
  } else {
    stream->arrive(layer);
  }
}

bool Peers::poll_peer(Peer& peer) noexcept {
  bool progressed = false;
  Retired retired[128];
  for (size_t n; (n = peer.ring->poll(retired)) > 0; progressed = true) {
    for (size_t i = 0; i < n; ++i) {
      auto& batch = *reinterpret_cast<RingBatch*>(retired[i].cookie);
      --batch.outstanding;
      batch.failed |= retired[i].status != WorkStatus::kSuccess;
    }
  }
  uint32_t immediates[256];
  for (size_t n; (n = peer.link->poll_immediates(immediates)) > 0; progressed = true) {
    for (size_t i = 0; i < n; ++i) deliver(immediates[i]);
  }
  if (peer.ring->failed() && !peer.lost.exchange(true)) progressed = true;
  return progressed;
}

bool Peers::poll() noexcept {
  bool progressed = false;
  WorkRingCounters totals;
  std::unique_lock lock(mutex_);
  const size_t count = peers_.size();
  for (size_t i = 0; i < count; ++i) {
    Peer& peer = peers_[i];  // a deque: references stay valid while others are added
    lock.unlock();
    progressed |= poll_peer(peer);
    const WorkRingCounters& c = peer.ring->counters();
    lock.lock();
    totals.work_requests += c.work_requests;
    totals.doorbells += c.doorbells;
    totals.signalled += c.signalled;
    totals.completions += c.completions;
    totals.back_pressure += c.back_pressure;
    totals.write_bytes += c.write_bytes;
    totals.read_bytes += c.read_bytes;
    totals.flushed += c.flushed;
  }
  totals_ = totals;
  return progressed;
}

Peers::Doorbell Peers::doorbell() noexcept {
  Doorbell result;
  const std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) {
    const uint64_t before = peer.ring->counters().doorbells;
    result.back_pressure |= !peer.ring->doorbell();
    result.posted |= peer.ring->counters().doorbells != before;
  }
  return result;
}

void Peers::append_event_fds(std::vector<int>& out) const {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (!peer.lost) out.push_back(peer.link->event_fd());
  }
}

}  // namespace kvtransfer
