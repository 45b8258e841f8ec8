#include "store/mount.h"
#include "traffic/operation.h"

namespace kvtransfer {

namespace {

class LoadOperation final : public Operation {
 public:
  LoadOperation(LoadSpec spec, const BlockLayout& layout, TrafficStats& stats)
      : Operation(spec.slots, spec.deadline_ns),
        into_(std::move(spec.into)),
        trace_id_(spec.trace_id),
        layout_(layout),
        stats_(stats) {
    job_.chain = std::move(spec.chain);
    job_.slots = std::move(spec.slots);
    job_.cuts = layout.cut_layers(spec.parts, BufferPool::kAlignment);
    job_.on_landed = [this](uint32_t first, uint32_t end) { landed(first, end); };
    job_.on_layers = [this](uint32_t first, uint32_t end) {
      for (uint32_t layer = first; into_ && layer < end; ++layer) into_->arrive(layer);
    };
    pending_bytes_ = job_.chain.size() * layout.full_block_bytes();
    stats_.pending_read_bytes.fetch_add(pending_bytes_, std::memory_order_relaxed);
  }
  ~LoadOperation() override { forget_pending(pending_bytes_); }

  bool step(Progress& progress) noexcept override {
    begin_job(progress);
    bool progressed = false;
    StoreIo& io = *progress.store_io;
    if (io.store().mount().slow() && io.next_bytes(job_) > 0) {
      io.abort(job_, {ErrorCode::kTimeout, 0, describe() + ": the store's mount doesn't answer"});
    }
    for (uint64_t bytes; (bytes = io.next_bytes(job_)) > 0; progressed = true) {
      if (!io.may_read() || !progress.take(TrafficKind::kStorageRead, bytes)) break;
      io.issue(job_);
    }
    // Waiters learn of a bad block at once, not when the last read in flight has come back.
    if (!job_.failure.ok() && !told_) {
      told_ = true;
      stats_.record_failure(TrafficKind::kStorageRead);
      if (into_) into_->fail(job_.failure);
    }
    if (decided()) {  // all accounts are settled before the ticket says so
      forget_pending(pending_bytes_);
      set_outcome(job_.failure);
      set_blocks(finished() ? job_.good_blocks : job_.complete_blocks());
    }
    return progressed;
  }

  // A mount that hangs keeps the slots, and not the waiter.
  bool decided() const noexcept override { return finished() || (begun_ && job_.overdue); }

  bool finished() const noexcept override { return begun_ && job_.finished(); }

  void stop(Progress& progress, Outcome why) noexcept override {
    begin_job(progress);
    progress.store_io->abort(job_, std::move(why));
  }

  std::string describe() const override {
    return "load of " + std::to_string(job_.chain.size()) + " blocks";
  }

 private:
  void begin_job(Progress& progress) noexcept {
    if (!begun_) progress.store_io->begin(job_);
    begun_ = true;
  }

  void landed(uint32_t first, uint32_t end) noexcept {
    const uint64_t bytes = layout_.layer_offset(end) - layout_.layer_offset(first);
    const int64_t now = now_ns();
    if (last_ns_ == 0) last_ns_ = ticket()->begin_ns();
    stats_.record({last_ns_, now, bytes, trace_id_, static_cast<int32_t>(first),
                   static_cast<int32_t>(TrafficKind::kStorageRead)});
    last_ns_ = now;
    forget_pending(bytes);
    add_bytes(bytes);
  }

  void forget_pending(uint64_t bytes) noexcept {
    bytes = std::min(bytes, pending_bytes_);
    pending_bytes_ -= bytes;
    stats_.pending_read_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  }

  ReadJob job_;
  std::shared_ptr<LayerStream> into_;
  uint64_t trace_id_;
  const BlockLayout& layout_;
  TrafficStats& stats_;
  uint64_t pending_bytes_ = 0;
  int64_t last_ns_ = 0;
  bool begun_ = false;
  bool told_ = false;
};

}  // namespace

std::unique_ptr<Operation> make_load(LoadSpec spec, const BlockLayout& layout,
                                     TrafficStats& stats) {
  return std::make_unique<LoadOperation>(std::move(spec), layout, stats);
}

}  // namespace kvtransfer
