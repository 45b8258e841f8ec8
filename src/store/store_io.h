// StoreIo: the asynchronous half of BlockStore. Moves block files between an IoQueue and pool
// slots; block_reader.h and block_writer.h say how.
//
// Thread safety: none; belongs to the IoQueue's owner thread. Jobs must outlive their last
// completion: a job is done with when finished() is true.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/block_reader.h"
#include "store/block_writer.h"
#include "store/operation_table.h"

namespace kvtransfer {

// The options for a queue that will serve this store: kAuto is told where threads are better.
IoOptions suited_to(const BlockStore& store, IoOptions options);

class StoreIo {
 public:
  // `memory_blocks` blocks are kept in memory in front of the store; 0: none.
  StoreIo(BlockStore& store, IoQueue& queue, BufferPool& pool, uint32_t memory_blocks = 0);

  void begin(ReadJob& job) { reader_.begin(job); }
  void begin(WriteJob& job) { writer_.begin(job); }
  uint64_t next_bytes(const ReadJob& job) const noexcept { return reader_.next_bytes(job); }
  // Whether issue() would find room. Reads come first: while some wait, writes may fill an eighth
  // of the queue, and that eighth is theirs.
  bool may_read() noexcept;
  bool may_write() noexcept;
  // A prefetch takes nothing from anybody: half of the queue at most, and only what no read wanted.
  bool may_prefetch() const noexcept;
  bool issue(ReadJob& job) noexcept { return may_read() && reader_.issue(job); }
  bool issue(WriteJob& job) noexcept { return may_write() && writer_.issue(job); }
  void abort(ReadJob& job, Outcome why) noexcept { reader_.abort(job, std::move(why)); }

  // Handles completions and verifies some of what has landed; returns how much was done. Never
  // blocks. Call queue.submit() after issuing.
  size_t poll() noexcept;
  // When poll() should be called though nothing happened: an operation may be overdue then.
  int64_t next_look_ns() const noexcept { return operations_.next_look_ns(); }

  // Blocking forms over the same code.
  uint32_t read_now(std::span<const BlockId> chain, std::span<const uint32_t> slots);
  uint32_t write_now(std::span<const BlockId> chain, std::span<const uint32_t> slots,
                     uint32_t valid_tokens_of_last);

  BlockStore& store() const noexcept { return store_; }
  // Null without one. Its stats() may be asked from any thread.
  const MemoryTier* memory_tier() const noexcept { return tier_.get(); }

 private:
  template <typename Job>
  void run(Job& job);

  BlockStore& store_;
  IoQueue& queue_;
  OperationTable operations_;
  std::unique_ptr<MemoryTier> tier_;
  BlockReader reader_;
  BlockWriter writer_;
  std::vector<BlockOperation> overdue_;
  // Whether anything was refused, before the last poll() and since.
  struct Refused {
    bool reads = false, writes = false;
  } refused_before_, refused_;
};

}  // namespace kvtransfer
