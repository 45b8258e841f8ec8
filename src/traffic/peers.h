// Peers: the links of one engine and their work rings, one per traffic class. Owned by the progress
// thread; the table of names is shared.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "kvtransfer/layer_stream.h"
#include "kvtransfer/traffic_manager.h"
#include "kvtransfer/work_ring.h"
#include "transport/peer_listener.h"

namespace kvtransfer {

// An immediate names a receive and a layer.
constexpr uint32_t kLayerBits = 10;
constexpr uint32_t kTagMask = (1u << (32 - kLayerBits)) - 1;
constexpr uint32_t pack_immediate(uint32_t tag, uint32_t layer) {
  return tag << kLayerBits | layer;
}
// In place of a layer: the sender gave the transfer up. The receive fails instead of waiting on.
constexpr uint32_t kGaveUp = (1u << kLayerBits) - 1;
static_assert(BlockLayout::kMaxLayers == (1u << kLayerBits) - 1);

// Requests of one layer of one operation; retired requests find it by address (the cookie).
struct RingBatch {
  uint64_t bytes = 0;
  int64_t begin_ns = 0;
  uint32_t outstanding = 0;
  bool posted = false;  // all requests of the layer are in the ring
  bool failed = false;
  bool finished = false;
};

class Peers {
 public:
  // --- any thread ---
  PeerId add(PeerLinks links);
  PeerId wait(const std::string& name, int64_t deadline_ns);
  bool alive(PeerId peer) const;
  std::vector<LinkAttributes> attributes(PeerId peer) const;
  uint32_t open_receive(std::shared_ptr<LayerStream> stream);
  void close_receive(uint32_t tag);
  WorkRingCounters counters(TrafficClass traffic_class) const;

  // --- progress thread ---
  // nullptr for an unknown peer.
  WorkRing* ring(PeerId peer, TrafficClass traffic_class);
  // Retires requests and delivers immediates; true if anything happened.
  bool poll() noexcept;
  struct Doorbell {
    bool posted = false;         // requests went out: completions may wait already
    bool back_pressure = false;  // some did not fit
  };
  Doorbell doorbell() noexcept;
  void append_event_fds(std::vector<int>& out) const;
  // Before sleeping on those descriptors. False: something is there already.
  bool arm() noexcept;
  // Requests of ours are on their way over a link.
  bool has_work_in_flight() const noexcept;
  // Some link has failed and is not quiet yet: look again soon.
  bool draining() const noexcept;

 private:
  struct Channel {
    std::unique_ptr<Link> link;
    std::unique_ptr<WorkRing> ring;
  };
  struct Peer {
    std::vector<Channel> channels;  // by TrafficClass; a single one serves all
    std::atomic<bool> lost{false};
    const std::string& name() const { return channels.front().link->peer(); }
  };
  bool poll_channel(Channel& channel) noexcept;
  void deliver(uint32_t immediate) noexcept;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Peer> peers_;                           // grows only; guarded by mutex_
  std::unordered_map<std::string, PeerId> by_name_;  // the newest of each name
  std::unordered_map<uint32_t, std::shared_ptr<LayerStream>> receives_;
  uint32_t next_tag_ = 0;
  std::array<WorkRingCounters, kNumTrafficClasses> totals_;
};

}  // namespace kvtransfer
