// BlockWriter: pool slots -> block files. Temporary name, then rename.
//
// Thread safety: none; belongs to the IoQueue's owner thread. A job must outlive its last
// completion: it is done with when finished() is true.
//
// With Durability::kFsync a block counts as stored only when its bytes, its name and the fan-out
// directories above it have been synced.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kvtransfer/block_store.h"
#include "store/operation_table.h"

namespace kvtransfer {

struct WriteJob {
  std::vector<BlockId> chain;
  std::vector<uint32_t> slots;
  uint32_t valid_tokens_of_last = 0;  // 0: full
  std::vector<bool> stored;           // per block: in the store now, by this job or before it
  std::vector<bool> fresh;            // per block: this job published it
  Outcome failure;
  bool overdue = false;  // the mount hangs; what is in flight may stay so for ever
  bool finished() const noexcept { return in_flight == 0 && next_block >= chain.size(); }

  // --- owned by BlockWriter ---
  struct Free {
    void operator()(uint8_t* memory) const noexcept { free(memory); }
  };
  struct Block {
    int fd = -1;
    int directory_fd = -1;
    std::string temporary;
    std::string path;
    int64_t begin_ns = 0;
    std::unique_ptr<uint8_t, Free> image;  // of an encoded file; else the slot is its image
    bool made_directory = false;
    bool renamed = false;
    bool duplicate = false;
    bool ended = false;
  };
  std::vector<Block> blocks;
  uint32_t next_block = 0;
  uint32_t in_flight = 0;
};

class BlockWriter {
 public:
  BlockWriter(BlockStore& store, OperationTable& operations, BufferPool& pool);

  void begin(WriteJob& job);
  // Starts the next block of a job. False when the queue is full or nothing is left.
  bool issue(WriteJob& job) noexcept;

  void on_completion(const BlockOperation& operation, int64_t result) noexcept;
  void on_overdue(const BlockOperation& operation) noexcept;

 private:
  bool make_image(WriteJob& job, uint32_t block) noexcept;
  bool open_temporary(WriteJob& job, uint32_t block) noexcept;
  void make_directory(WriteJob& job, uint32_t block, BlockStep step) noexcept;
  void write_payload(WriteJob& job, uint32_t block) noexcept;
  void sync_payload(WriteJob& job, uint32_t block) noexcept;
  void rename_temporary(WriteJob& job, uint32_t block, bool no_replace) noexcept;
  void published(WriteJob& job, uint32_t block) noexcept;
  void open_directory(WriteJob& job, uint32_t block, uint32_t level) noexcept;
  void directory_synced(const BlockOperation& operation) noexcept;

  void step_done(const BlockOperation& operation) noexcept;
  bool try_otherwise(const BlockOperation& operation, int error) noexcept;
  void finish(WriteJob& job, uint32_t block, bool stored) noexcept;
  void fail(const BlockOperation& operation, ErrorCode code, int error,
            const std::string& why) noexcept;
  uint8_t* image_of(const WriteJob& job, uint32_t block) const noexcept;
  std::string directory_at(const BlockId& id, uint32_t level) const;
  size_t fan_out_index(const BlockId& id) const noexcept;

  BlockStore& store_;
  OperationTable& operations_;
  BufferPool& pool_;
  std::string token_;  // of this writer's temporaries, whichever process or host it runs in
  uint64_t temporary_counter_ = 0;
  std::vector<bool> fan_out_synced_;  // per leaf directory: the names above it are durable
};

}  // namespace kvtransfer
