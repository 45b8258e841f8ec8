#include <utility>

#include "store/mount.h"
#include "traffic/operation.h"

namespace kvtransfer {

namespace {

class PersistOperation final : public Operation {
 public:
  PersistOperation(PersistSpec spec, std::shared_ptr<BlockStore> store, uint32_t admitted)
      : Operation(spec.slots, kNoDeadline),
        trace_id_(spec.trace_id),
        store_(std::move(store)),
        admitted_(admitted) {
    job_.chain = std::move(spec.chain);
    job_.slots = std::move(spec.slots);
  }
  ~PersistOperation() override { end_writes(); }

  bool step(Progress& progress) noexcept override {
    begin_job(progress);
    bool progressed = false;
    const uint64_t bytes = progress.store_io->store().file_bytes();
    StoreIo& io = *progress.store_io;
    if (io.store().mount().slow() && job_.next_block < job_.chain.size()) {
      stop(progress, {ErrorCode::kTimeout, 0, describe() + ": the store's mount doesn't answer"});
    }
    while (job_.next_block < job_.chain.size()) {
      if (!io.may_write() || !progress.take(TrafficKind::kStorageWrite, bytes)) break;
      io.issue(job_);
      progressed = true;
    }
    if (decided()) finish(progress);
    return progressed;
  }

  bool background() const noexcept override { return true; }

  // A mount that hangs keeps the slots, and not the waiter.
  bool decided() const noexcept override { return finished() || (begun_ && job_.overdue); }

  bool finished() const noexcept override { return begun_ && job_.finished(); }

  void stop(Progress& progress, Outcome why) noexcept override {
    begin_job(progress);
    // What is being written completes or fails as a whole; the rest is never started.
    set_outcome(std::move(why));
    job_.next_block = static_cast<uint32_t>(job_.chain.size());
  }

  std::string describe() const override {
    return "persist of " + std::to_string(job_.chain.size()) + " blocks";
  }

 private:
  void begin_job(Progress& progress) noexcept {
    if (!begun_) progress.store_io->begin(job_);
    begun_ = true;
  }

  void end_writes() noexcept { store_->end_writes(std::exchange(admitted_, 0)); }

  void finish(Progress& progress) noexcept {
    if (std::exchange(reported_, true)) return;
    end_writes();  // all accounts are settled before the ticket says so
    const auto stored = std::count(job_.stored.begin(), job_.stored.end(), true);
    const auto fresh =
        static_cast<uint64_t>(std::count(job_.fresh.begin(), job_.fresh.end(), true));
    set_outcome(job_.failure);
    set_blocks(static_cast<uint32_t>(stored));
    set_fresh(job_.fresh);
    if (!job_.failure.ok()) progress.stats->record_failure(TrafficKind::kStorageWrite);
    if (fresh == 0) return;
    const uint64_t bytes = fresh * progress.layout->full_block_bytes();
    add_bytes(bytes);
    progress.stats->record({ticket()->begin_ns(), now_ns(), bytes, trace_id_, 0,
                            static_cast<int32_t>(TrafficKind::kStorageWrite)});
  }

  WriteJob job_;
  uint64_t trace_id_;
  std::shared_ptr<BlockStore> store_;
  uint32_t admitted_;
  bool begun_ = false;
  bool reported_ = false;
};

}  // namespace

std::unique_ptr<Operation> make_persist(PersistSpec spec, std::shared_ptr<BlockStore> store,
                                        uint32_t admitted) {
  return std::make_unique<PersistOperation>(std::move(spec), std::move(store), admitted);
}

}  // namespace kvtransfer
