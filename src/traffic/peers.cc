#include "traffic/peers.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace kvtransfer {

PeerId Peers::add(PeerLinks links) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_.emplace_back();
  for (auto& link : links) {
    auto ring = std::make_unique<WorkRing>(*link);
    peer.channels.push_back({std::move(link), std::move(ring)});
  }
  const auto id = static_cast<PeerId>(peers_.size() - 1);
  by_name_[peer.name()] = id;
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

std::vector<LinkAttributes> Peers::attributes(PeerId peer) const {
  const std::lock_guard lock(mutex_);
  std::vector<LinkAttributes> out;
  if (peer >= peers_.size()) return out;
  for (const Channel& channel : peers_[peer].channels) {
    out.push_back(channel.link->attributes());
  }
  return out;
}

WorkRingCounters Peers::counters(TrafficClass traffic_class) const {
  const std::lock_guard lock(mutex_);
  return totals_[static_cast<size_t>(traffic_class)];
}

WorkRing* Peers::ring(PeerId peer, TrafficClass traffic_class) {
  const std::lock_guard lock(mutex_);
  if (peer >= peers_.size()) return nullptr;
  auto& channels = peers_[peer].channels;
  return channels[std::min(static_cast<size_t>(traffic_class), channels.size() - 1)].ring.get();
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

bool Peers::poll_channel(Channel& channel) noexcept {
  bool progressed = false;
  Retired retired[128];
  for (size_t n; (n = channel.ring->poll(retired)) > 0; progressed = true) {
    for (size_t i = 0; i < n; ++i) {
      auto& batch = *reinterpret_cast<RingBatch*>(retired[i].cookie);
      --batch.outstanding;
      batch.failed |= retired[i].status != WorkStatus::kSuccess;
    }
  }
  uint32_t immediates[256];
  for (size_t n; (n = channel.link->poll_immediates(immediates)) > 0; progressed = true) {
    for (size_t i = 0; i < n; ++i) deliver(immediates[i]);
  }
  return progressed;
}

bool Peers::poll() noexcept {
  bool progressed = false;
  std::array<WorkRingCounters, kNumTrafficClasses> totals;
  std::unique_lock lock(mutex_);
  const size_t count = peers_.size();
  for (size_t i = 0; i < count; ++i) {
    Peer& peer = peers_[i];  // a deque: references stay valid while others are added
    lock.unlock();
    bool failed = false;
    for (Channel& channel : peer.channels) {
      progressed |= poll_channel(channel);
      failed |= channel.ring->failed();
    }
    // One class lost is the peer lost: both tell of the same process.
    if (failed && !peer.lost.exchange(true)) {
      progressed = true;
      for (Channel& channel : peer.channels) {
        channel.ring->fail({ErrorCode::kPeerLost, 0, "peer " + peer.name() + " is gone"});
      }
    }
    lock.lock();
    for (size_t c = 0; c < peer.channels.size(); ++c) {
      totals[c] += peer.channels[c].ring->counters();
    }
  }
  totals_ = totals;
  return progressed;
}

Peers::Doorbell Peers::doorbell() noexcept {
  Doorbell result;
  const std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) {
    for (Channel& channel : peer.channels) {
      const uint64_t before = channel.ring->counters().doorbells;
      result.back_pressure |= !channel.ring->doorbell();
      result.posted |= channel.ring->counters().doorbells != before;
    }
  }
  return result;
}

void Peers::append_event_fds(std::vector<int>& out) const {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    for (const Channel& channel : peer.channels) {
      if (!channel.link->drained()) out.push_back(channel.link->event_fd());
    }
  }
}

bool Peers::has_work_in_flight() const noexcept {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    for (const Channel& channel : peer.channels) {
      if (channel.ring->outstanding() > 0) return true;
    }
  }
  return false;
}

bool Peers::draining() const noexcept {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    for (const Channel& channel : peer.channels) {
      if (channel.link->failed() && !channel.link->drained()) return true;
    }
  }
  return false;
}

bool Peers::arm() noexcept {
  const std::lock_guard lock(mutex_);
  bool quiet = true;
  for (Peer& peer : peers_) {
    for (Channel& channel : peer.channels) quiet &= channel.link->arm();
  }
  return quiet;
}

}  // namespace kvtransfer
