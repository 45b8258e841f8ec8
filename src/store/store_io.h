// StoreIo: the asynchronous half of BlockStore. Moves block files between an IoQueue and pool
// slots.
//
// Thread safety: none; belongs to the IoQueue's owner thread. Jobs must outlive their last
// completion: a job is done with when finished() is true.
//
// A read job walks its chain part-major: the first layers of every block, then the next layers of
// every block, so that the layer stream of the whole prefix advances from the front. `cuts` come
// from BlockLayout::cut_layers; one part is the paper's Full Block read.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kvtransfer/block_store.h"

namespace kvtransfer {

struct ReadJob {
  std::vector<BlockId> chain;
  std::vector<uint32_t> slots;  // one per block
  std::vector<uint32_t> cuts;   // layer boundaries; at least {0, num_layers}
  // Layers [first, end) of one more block have landed and verified.
  std::function<void(uint32_t first_layer, uint32_t end_layer)> on_layers;

  uint32_t num_parts() const noexcept { return static_cast<uint32_t>(cuts.size()) - 1; }
  // Blocks [0, good_blocks) are good so far; shrinks when a block turns out missing or bad.
  uint32_t good_blocks = 0;
  Outcome failure;  // the first one
  bool finished() const noexcept { return in_flight == 0 && (aborted || next_part >= num_parts()); }

  // --- owned by StoreIo ---
  struct Block {
    int fd = -1;
    uint32_t parts_done = 0;
    bool opened = false;  // the header page has landed and is right
  };
  std::vector<Block> blocks;
  std::vector<std::string> paths;
  uint32_t next_part = 0;
  uint32_t next_block = 0;
  uint32_t in_flight = 0;
  bool aborted = false;
};

struct WriteJob {
  std::vector<BlockId> chain;
  std::vector<uint32_t> slots;
  uint32_t valid_tokens_of_last = 0;  // 0: full
  std::vector<bool> stored;           // per block: in the store now, by this job or before it
  std::vector<bool> fresh;            // per block: this job published it
  Outcome failure;
  bool finished() const noexcept { return in_flight == 0 && next_block >= chain.size(); }

  // --- owned by StoreIo ---
  struct Block {
    int fd = -1;
    std::string temporary;
    std::string path;
    bool made_directory = false;
  };
  std::vector<Block> blocks;
  uint32_t next_block = 0;
  uint32_t in_flight = 0;
};

class StoreIo {
 public:
  StoreIo(BlockStore& store, IoQueue& queue, BufferPool& pool);

  // Bytes the next issue() would read, 0 when nothing can be issued now (all issued, or waiting for
  // headers).
  uint64_t next_bytes(const ReadJob& job) const noexcept;
  // Starts the next piece of a job. False when the queue is full or next_bytes() is 0.
  bool issue(ReadJob& job) noexcept;
  bool issue(WriteJob& job) noexcept;
  void begin(ReadJob& job);
  void begin(WriteJob& job);
  // No further pieces; finished() once what is in flight has completed.
  void abort(ReadJob& job, Outcome why) noexcept;

  // Handles completions; returns how many. Never blocks. Call queue.submit() after issuing.
  size_t poll() noexcept;

  // Blocking forms over the same code.
  uint32_t read_now(std::span<const BlockId> chain, std::span<const uint32_t> slots);
  uint32_t write_now(std::span<const BlockId> chain, std::span<const uint32_t> slots,
                     uint32_t valid_tokens_of_last);

  const BlockStore& store() const noexcept { return store_; }

 private:
  enum class Step : uint8_t { kReadOpen, kRead, kWriteOpen, kWrite, kWriteSync, kRename };
  struct Record {
    Step step;
    ReadJob* read = nullptr;
    WriteJob* write = nullptr;
    uint32_t block = 0;
    uint32_t part = 0;
  };

  bool start(const Record& record, IoRequest request) noexcept;
  void handle(const Record& record, int64_t result) noexcept;
  void on_read_open(const Record& record, int64_t result) noexcept;
  void on_read(const Record& record, int64_t result) noexcept;
  bool read_part(ReadJob& job, uint32_t block, uint32_t part) noexcept;
  void fail_block(ReadJob& job, uint32_t block, ErrorCode code, int error,
                  std::string why) noexcept;
  void finish_part(ReadJob& job, uint32_t block) noexcept;
  static void close_files(ReadJob& job) noexcept;
  std::string describe(const ReadJob& job, uint32_t block) const;

  bool open_temporary(WriteJob& job, uint32_t block) noexcept;
  void on_write_step(const Record& record, int64_t result) noexcept;
  bool next_write_step(const Record& record) noexcept;
  bool retry_write(const Record& record, int64_t result) noexcept;
  void finish_write(WriteJob& job, uint32_t block, bool published, bool duplicate) noexcept;
  void fail_write(const Record& record, int error) noexcept;
  uint32_t valid_tokens(const WriteJob& job, uint32_t block) const noexcept;

  uint64_t part_begin(const ReadJob& job, uint32_t part) const noexcept;
  uint64_t part_end(const ReadJob& job, uint32_t part) const noexcept;

  BlockStore& store_;
  IoQueue& queue_;
  BufferPool& pool_;
  std::vector<Record> records_;  // one per operation in flight; user_data is the index
  std::vector<uint32_t> free_records_;
  uint64_t temporary_counter_ = 0;
};

}  // namespace kvtransfer
