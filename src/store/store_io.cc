#include "store/store_io.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace kvtransfer {

namespace {

// One poll verifies about so much before it looks for completions again: some 50 us.
constexpr uint64_t kVerifyBytes = uint64_t{512} << 10;

}  // namespace

IoOptions suited_to(const BlockStore& store, IoOptions options) {
  if (store.in_memory()) {
    options.prefer_threads = store.root() + " is in memory (tmpfs): a thread's own copy is faster";
  }
  return options;
}

StoreIo::StoreIo(BlockStore& store, IoQueue& queue, BufferPool& pool, uint32_t memory_blocks)
    : store_(store),
      queue_(queue),
      operations_(queue, store.mount()),
      tier_(memory_blocks == 0 ? nullptr
                               : std::make_unique<MemoryTier>(memory_blocks, store.slot_bytes())),
      reader_(store, operations_, pool, tier_.get()),
      writer_(store, operations_, pool) {
  if (pool.header_bytes() != store.header_bytes() || pool.slot_bytes() < store.slot_bytes()) {
    throw Error(ErrorCode::kMismatch,
                "BlockStore: the pool's slots (" + std::to_string(pool.slot_bytes()) +
                    " bytes) don't fit blocks of " + std::to_string(store.slot_bytes()) + " bytes");
  }
}

bool StoreIo::may_read() noexcept {
  const uint32_t share = std::max<uint32_t>(operations_.capacity() / 8, 1);
  const uint32_t writes = operations_.writes_in_flight();
  const uint32_t kept = refused_before_.writes ? share - std::min(share, writes) : 0;
  const bool may = operations_.free() > kept;
  refused_.reads |= !may;
  return may;
}

bool StoreIo::may_write() noexcept {
  const uint32_t share = std::max<uint32_t>(operations_.capacity() / 8, 1);
  const bool crowded = refused_before_.reads && operations_.writes_in_flight() >= share;
  const bool may = operations_.free() > 0 && !crowded;
  refused_.writes |= !may;
  return may;
}

bool StoreIo::may_prefetch() const noexcept {
  return !refused_before_.reads && !refused_.reads &&
         operations_.free() > operations_.capacity() / 2;
}

size_t StoreIo::poll() noexcept {
  refused_before_ = std::exchange(refused_, {});
  size_t done = operations_.poll([this](const BlockOperation& operation, int64_t result) {
    if (operation.read != nullptr) {
      reader_.on_completion(operation, result);
    } else {
      writer_.on_completion(operation, result);
    }
  });
  operations_.take_overdue(now_ns(), overdue_);
  for (const BlockOperation& operation : overdue_) {
    if (operation.read != nullptr) {
      reader_.on_overdue(operation);
    } else {
      writer_.on_overdue(operation);
    }
  }
  done += overdue_.size();
  if (!reader_.wants_verify()) return done;
  queue_.submit();  // what follows the completions runs meanwhile
  reader_.verify(kVerifyBytes);
  return done + 1;
}

template <typename Job>
void StoreIo::run(Job& job) {
  begin(job);
  while (!job.finished()) {
    while (issue(job)) {
    }
    if (poll() == 0 && queue_.in_flight() > 0) queue_.wait({}, now_ns() + 100'000'000);
  }
  queue_.submit();
}

uint32_t StoreIo::read_now(std::span<const BlockId> chain, std::span<const uint32_t> slots) {
  ReadJob job;
  job.chain.assign(chain.begin(), chain.end());
  job.slots.assign(slots.begin(), slots.end());
  job.cuts = {0, store_.layout().num_layers()};
  job.on_landed = job.on_layers = [](uint32_t, uint32_t) {};
  run(job);
  return job.good_blocks;
}

uint32_t StoreIo::write_now(std::span<const BlockId> chain, std::span<const uint32_t> slots,
                            uint32_t valid_tokens_of_last) {
  WriteJob job;
  const Admission admitted = store_.admit(chain);
  job.chain.assign(chain.begin(), chain.begin() + admitted.blocks);
  job.slots.assign(slots.begin(), slots.begin() + admitted.blocks);
  if (job.chain.size() == chain.size()) job.valid_tokens_of_last = valid_tokens_of_last;
  run(job);
  store_.end_writes(admitted.reserved);
  return static_cast<uint32_t>(std::count(job.stored.begin(), job.stored.end(), true));
}

}  // namespace kvtransfer
