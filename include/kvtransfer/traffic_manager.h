// TrafficManager: owns every byte moved in or out of one engine. One progress thread drives
// storage, links and device copies; everyone else hands it work and sees results through streams
// and tickets.
//
//   load     store            -> pool slots          (Full Blocks, or runs of their layers)
//   stage    pool slots       -> device cache        (layer by layer; ours, or a peer's by RDMA
//   read) push     device cache     -> a peer's pool slots (layer by layer, write + immediate)
//   serve    tells a peer, layer by layer, that our slots can be read (immediates only)
//   persist  pool slots       -> store
//   prefetch store            -> memory tier         (TrafficOptions::memory_blocks)
//
// Each move advances layer by layer behind streams: layer l moves once `after` is ready for l (its
// source is there) and `gate` is ready for l - R, where R is the number of layers the device cache
// rotates through (the slot's previous tenant has left). `into` counts what has arrived.
//
// Thread safety: all methods may be called from any thread.
// Invariants:
//  1. A slot named in an operation is retained until no transfer can touch it: the ticket is done
//     only then, also after a timeout, a cancel or the loss of the peer. One exception: when the
//     store's mount hangs, a load's or persist's ticket is done at once and its slots are given
//     back when the mount answers.
//  2. Operations of one kind start in the order of their submission. Storage writes use what reads
//     leave of the I/O queue, and never less than an eighth of it.
//  3. Nothing here can fail silently: a failed operation fails its `into` stream and its ticket.
//  4. Submitting never blocks on I/O. A full command queue throws Error(kExhausted).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvtransfer/block_store.h"
#include "kvtransfer/layer_stream.h"
#include "kvtransfer/paged_cache.h"
#include "kvtransfer/verbs.h"
#include "kvtransfer/work_ring.h"

namespace kvtransfer {

enum class TrafficKind : uint8_t {
  kStorageRead,
  kStorageWrite,
  kDeviceCopy,
  kNetworkRead,
  kNetworkWrite,
};
constexpr size_t kNumTrafficKinds = 5;
std::string_view traffic_kind_name(TrafficKind kind) noexcept;

struct TrafficCounters {
  uint64_t operations = 0;  // pieces moved: file parts, layers
  uint64_t bytes = 0;
  uint64_t failures = 0;
};

// One finished piece, for a timeline. Times are CLOCK_MONOTONIC ns.
struct TraceEvent {
  int64_t begin_ns;
  int64_t end_ns;
  uint64_t bytes;
  uint64_t trace_id;  // the caller's, e.g. a request number
  int32_t layer;      // first layer of the piece
  int32_t kind;       // TrafficKind
};

enum class Transport : uint8_t {
  kShm,    // peers of this machine, whose pools are mapped
  kVerbs,  // RC queue pairs
};
// How `stage` moves bytes from the pool to the device cache.
enum class CopyBackend : uint8_t {
  kCpu,
  kNic,  // through a queue pair looped back to the NIC (kVerbs only; the paper's section 5)
};

struct TrafficOptions {
  std::string name = "engine";
  uint64_t epoch = 0;
  std::string listen;  // control address for peers (docs/wire_format.md); empty: none
  Transport transport = Transport::kShm;
  CopyBackend copy = CopyBackend::kCpu;
  VerbsOptions verbs;  // kVerbs only
  // At most so long the progress thread looks again before it sleeps while requests are in flight
  // on a link; it does so only while that pays (docs/tuning.md). 0: never.
  uint32_t spin_us = 20;
  IoOptions io;
  std::array<uint64_t, kNumTrafficKinds> bytes_per_second = {};  // 0: no cap
  bool trace = false;
  // Hot blocks kept in memory in front of the store: read twice not long ago, or prefetched. 0:
  // off.
  uint32_t memory_blocks = 0;
};

using PeerId = uint32_t;

// How one operation went. Shared between the submitter and the progress thread.
class Ticket {
 public:
  bool done() const noexcept { return done_.load(std::memory_order_acquire) != 0; }
  // False when the deadline passes first.
  bool wait(int64_t deadline_ns) const noexcept;
  // Asks the operation to stop. It is done() when nothing can be touched any more.
  void cancel() noexcept;
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_acquire); }

  // --- valid once done() ---
  const Outcome& outcome() const noexcept { return outcome_; }
  // load: length of the good prefix. persist: blocks in the store now.
  uint32_t blocks() const noexcept { return blocks_; }
  // persist: per block, whether this operation published it.
  const std::vector<bool>& fresh() const noexcept { return fresh_; }
  uint64_t bytes() const noexcept { return bytes_; }
  int64_t begin_ns() const noexcept { return begin_ns_; }
  int64_t end_ns() const noexcept { return end_ns_; }

 private:
  friend class Operation;
  Outcome outcome_;
  uint32_t blocks_ = 0;
  std::vector<bool> fresh_;
  uint64_t bytes_ = 0;
  int64_t begin_ns_ = 0;
  int64_t end_ns_ = 0;
  std::shared_ptr<Notifier> wake_;  // of the progress thread
  std::atomic<bool> cancelled_{false};
  std::atomic<uint32_t> done_{0};  // release pairs with done(): the fields above are final
};

struct LoadSpec {
  std::vector<BlockId> chain;
  std::vector<uint32_t> slots;        // one per block
  uint32_t parts = 1;                 // storage reads per block; see BlockLayout::cut_layers
  std::shared_ptr<LayerStream> into;  // one arrival per block and layer
  int64_t deadline_ns = INT64_MAX;
  uint64_t trace_id = 0;
};

struct PersistSpec {
  std::vector<BlockId> chain;
  std::vector<uint32_t> slots;
  uint64_t trace_id = 0;
};

// Tokens [first_token, first_token + num_tokens) of one sequence in every layer, between the device
// cache and blocks that start at `block_starts` (byte offsets of Full Blocks in the pool region:
// ours for a local stage, the peer's otherwise).
struct MoveSpec {
  std::shared_ptr<const PagedCache> cache;
  std::vector<int32_t> pages;
  std::vector<uint64_t> block_starts;
  uint64_t first_token = 0;
  uint64_t num_tokens = 0;
  std::vector<uint32_t> slots;         // our slots to retain meanwhile
  std::shared_ptr<LayerStream> after;  // null: every layer's source is there
  std::shared_ptr<LayerStream> gate;   // null: no rotation to wait for
  std::shared_ptr<LayerStream> into;   // null: nobody counts
  PeerId peer = 0;                     // stage_from_peer, push, serve
  TrafficClass traffic_class = TrafficClass::kKv;
  uint32_t tag = 0;  // push, serve: the peer's receive tag
  int64_t deadline_ns = INT64_MAX;
  uint64_t trace_id = 0;
};

class TrafficManager {
 public:
  // `store` may be null (no load or persist) and so may `device` (no stage or push). Both regions
  // serve as transfer memory for the manager's whole life.
  TrafficManager(std::shared_ptr<BlockStore> store, std::shared_ptr<BufferPool> pool,
                 std::shared_ptr<MemoryRegion> device, const BlockLayout& layout,
                 const TrafficOptions& options);
  // Cancels and drains everything, then stops the progress thread.
  ~TrafficManager();

  // A stream whose events ring event_fd() and whose publish() wakes the progress thread.
  std::shared_ptr<LayerStream> make_stream(uint32_t expected);

  std::shared_ptr<Ticket> load(LoadSpec spec);
  std::shared_ptr<Ticket> persist(PersistSpec spec);
  // Reads a chain into the memory tier, through pool slots that happen to be free and below all
  // other reads. Its ticket's blocks() counts those that are there then. Needs memory_blocks.
  std::shared_ptr<Ticket> prefetch(std::vector<BlockId> chain);
  std::shared_ptr<Ticket> stage(MoveSpec spec);
  std::shared_ptr<Ticket> stage_from_peer(MoveSpec spec);
  std::shared_ptr<Ticket> push(MoveSpec spec);
  std::shared_ptr<Ticket> serve(MoveSpec spec);

  // Immediates with this tag count as arrivals in `stream`. Tags are not reused before 4 M others.
  uint32_t open_receive(std::shared_ptr<LayerStream> stream);
  void close_receive(uint32_t tag);

  // Connects to a peer's listen address: again after its loss, which makes a new peer of a new
  // epoch. Throws Error(kPeerLost | kTimeout | kMismatch).
  PeerId connect(const std::string& address, int64_t deadline_ns);
  // The live peer of that name, connected or accepted. Throws Error(kTimeout).
  PeerId wait_peer(const std::string& name, int64_t deadline_ns);
  bool peer_alive(PeerId peer) const;
  // What its links really are, by TrafficClass (one entry when one link serves all).
  std::vector<LinkAttributes> peer_attributes(PeerId peer) const;
  WorkRingCounters ring_counters(TrafficClass traffic_class) const;
  // Of the device's port; empty without one.
  std::vector<std::pair<std::string, uint64_t>> hardware_counters() const;

  // Tokens queued or in flight from storage: what the request scheduler balances.
  uint64_t read_queue_tokens() const noexcept;
  TrafficCounters counters(TrafficKind kind) const noexcept;
  MemoryTierStats memory_tier_stats() const noexcept;
  void set_cap(TrafficKind kind, uint64_t bytes_per_second) noexcept;
  // The pieces finished since the last call (options.trace).
  std::vector<TraceEvent> take_trace();

  // Readable after any stream of make_stream() changed or any ticket got done. Call drain_events()
  // before looking at them, not after.
  int event_fd() const noexcept;
  void drain_events() noexcept;

  std::string_view io_backend() const noexcept;
  const std::string& io_fallback_reason() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvtransfer
