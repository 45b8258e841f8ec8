#include "traffic/operation.h"

namespace kvtransfer {

namespace {

// Blocks read at a time, each through a pool slot of its own.
constexpr size_t kBatch = 4;

// Ends early, and without an error, at the first block that can't be read.
class PrefetchOperation final : public Operation {
 public:
  PrefetchOperation(std::vector<BlockId> chain, const BlockLayout& layout)
      : Operation({}, kNoDeadline), chain_(std::move(chain)), layout_(layout) {}

  bool background() const noexcept override { return true; }
  bool finished() const noexcept override {
    return !reading_ && (stopped_ || next_ >= chain_.size());
  }
  void stop(Progress&, Outcome why) noexcept override {
    set_outcome(std::move(why));
    stopped_ = true;
  }
  std::string describe() const override {
    return "prefetch of " + std::to_string(chain_.size()) + " blocks";
  }

  bool step(Progress& progress) noexcept override {
    StoreIo& io = *progress.store_io;
    bool progressed = false;
    if (!reading_ && !finished()) progressed = begin_batch(progress);
    while (reading_ && io.next_bytes(job_) > 0 && io.may_prefetch() &&
           progress.take(TrafficKind::kStorageRead, io.next_bytes(job_))) {
      io.issue(job_);
      progressed = true;
    }
    if (reading_ && stopped_) io.abort(job_, {ErrorCode::kCancelled, 0, "cancelled"});
    if (reading_ && job_.finished()) {
      end_batch(progress);
      progressed = true;
    }
    if (finished()) set_blocks(done_);
    return progressed;
  }

 private:
  bool begin_batch(Progress& progress) noexcept {
    const size_t count = std::min(kBatch, chain_.size() - next_);
    std::vector<uint32_t> slots(count);
    if (!progress.pool->acquire(slots)) {  // all are wanted: look again later
      progress.wake_at_ns = std::min(progress.wake_at_ns, progress.now_ns + 2'000'000);
      return false;
    }
    job_ = {};
    const auto first = chain_.begin() + static_cast<ptrdiff_t>(next_);
    job_.chain.assign(first, first + static_cast<ptrdiff_t>(count));
    job_.slots = std::move(slots);
    job_.cuts = {0, layout_.num_layers()};
    job_.for_memory_tier = true;
    job_.on_landed = job_.on_layers = [](uint32_t, uint32_t) {};
    progress.store_io->begin(job_);
    reading_ = true;
    return true;
  }

  void end_batch(Progress& progress) noexcept {
    reading_ = false;
    for (const uint32_t slot : job_.slots) progress.pool->release(slot);
    done_ += job_.good_blocks;
    next_ += job_.chain.size();
    stopped_ |= !job_.failure.ok();
  }

  std::vector<BlockId> chain_;
  const BlockLayout& layout_;
  ReadJob job_;
  size_t next_ = 0;
  uint32_t done_ = 0;
  bool reading_ = false;
  bool stopped_ = false;
};

}  // namespace

std::unique_ptr<Operation> make_prefetch(std::vector<BlockId> chain, const BlockLayout& layout) {
  return std::make_unique<PrefetchOperation>(std::move(chain), layout);
}

}  // namespace kvtransfer
