// Operation: one submitted piece of work, stepped by the progress thread until it is finished.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/futex.h"
#include "base/notifier.h"
#include "kvtransfer/traffic_manager.h"
#include "store/store_io.h"
#include "traffic/peers.h"
#include "traffic/token_bucket.h"
#include "traffic/traffic_stats.h"

namespace kvtransfer {

// What the progress thread lends to an operation's step.
struct Progress {
  StoreIo* store_io = nullptr;  // null without a store
  BufferPool* pool = nullptr;
  MemoryRegion* device = nullptr;
  const BlockLayout* layout = nullptr;
  Peers* peers = nullptr;
  std::optional<PeerId> copy_peer;  // the loopback link that `stage` goes through, if any
  TrafficStats* stats = nullptr;
  std::array<TokenBucket, kNumTrafficKinds>* buckets = nullptr;
  int64_t now_ns = 0;
  int64_t wake_at_ns = kNoDeadline;  // the earliest time at which a refused step should be tried

  bool take(TrafficKind kind, uint64_t bytes) noexcept {
    TokenBucket& bucket = (*buckets)[static_cast<size_t>(kind)];
    if (bucket.take(bytes, now_ns)) return true;
    wake_at_ns = std::min(wake_at_ns, bucket.ready_at());
    return false;
  }
};

class Operation {
 public:
  Operation(std::vector<uint32_t> retained, int64_t deadline_ns)
      : ticket_(std::make_shared<Ticket>()),
        retained_(std::move(retained)),
        deadline_ns_(deadline_ns) {}
  virtual ~Operation() = default;

  // Moves on as far as it can without blocking; true if anything changed.
  virtual bool step(Progress& progress) noexcept = 0;
  // Nothing left to do and nothing in flight.
  virtual bool finished() const noexcept = 0;
  // The outcome is final, though a transfer may still be in flight.
  virtual bool decided() const noexcept { return finished(); }
  // Steps after all others, with what they leave of the queues.
  virtual bool background() const noexcept { return false; }
  // No new pieces; finished() after what is in flight.
  virtual void stop(Progress& progress, Outcome why) noexcept = 0;

  // Called once, by the submitter, who still holds the slots.
  void begin(BufferPool& pool, std::shared_ptr<Notifier> wake) noexcept {
    ticket_->wake_ = std::move(wake);
    ticket_->begin_ns_ = now_ns();
    for (const uint32_t slot : retained_) pool.retain(slot);
  }
  // Undoes begin() for an operation that could not be handed over.
  void drop(BufferPool& pool) noexcept {
    for (const uint32_t slot : retained_) pool.release(slot);
  }
  // Stops the operation when it was cancelled or is late.
  void check_limits(Progress& progress) noexcept {
    if (stopped_) return;
    if (ticket_->cancelled()) {
      stopped_ = true;
      stop(progress, {ErrorCode::kCancelled, 0, "cancelled"});
    } else if (progress.now_ns >= deadline_ns_) {
      stopped_ = true;
      stop(progress, {ErrorCode::kTimeout, 0, describe() + ": deadline passed"});
    } else {
      progress.wake_at_ns = std::min(progress.wake_at_ns, deadline_ns_);
    }
  }
  // Tells the waiters, when decided(). The slots stay retained until end().
  void settle(Notifier& events) noexcept {
    if (ticket_->done()) return;
    ticket_->end_ns_ = now_ns();
    ticket_->done_.store(1, std::memory_order_release);
    futex_wake_all(ticket_->done_);
    events.ring();
  }
  // Gives the slots back, then tells the waiters. Called once, when finished().
  void end(Progress& progress, Notifier& events) noexcept {
    drop(*progress.pool);
    settle(events);
  }

  const std::shared_ptr<Ticket>& ticket() const noexcept { return ticket_; }
  // What was attempted, for messages.
  virtual std::string describe() const = 0;

 protected:
  // What a ticket says is final once it is done.
  void set_outcome(Outcome outcome) noexcept {
    if (!ticket_->done() && ticket_->outcome_.ok()) ticket_->outcome_ = std::move(outcome);
  }
  void set_blocks(uint32_t blocks) noexcept {
    if (!ticket_->done()) ticket_->blocks_ = blocks;
  }
  void set_fresh(std::vector<bool> fresh) noexcept { ticket_->fresh_ = std::move(fresh); }
  void add_bytes(uint64_t bytes) noexcept {
    if (!ticket_->done()) ticket_->bytes_ += bytes;
  }

 private:
  std::shared_ptr<Ticket> ticket_;
  std::vector<uint32_t> retained_;
  int64_t deadline_ns_;
  bool stopped_ = false;
};

std::unique_ptr<Operation> make_load(LoadSpec spec, const BlockLayout& layout, TrafficStats& stats);
std::unique_ptr<Operation> make_prefetch(std::vector<BlockId> chain, const BlockLayout& layout);
// `admitted` blocks of the store's reservation are paid back when the operation ends.
std::unique_ptr<Operation> make_persist(PersistSpec spec, std::shared_ptr<BlockStore> store,
                                        uint32_t admitted);

enum class MoveKind : uint8_t { kStage, kStageFromPeer, kPush, kServe };
std::unique_ptr<Operation> make_move(MoveKind kind, MoveSpec spec, uint32_t num_layers);

}  // namespace kvtransfer
