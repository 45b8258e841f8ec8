// BlockReader: block files -> pool slots.
//
// Thread safety: none; belongs to the IoQueue's owner thread. A job must outlive its last
// completion: it is done with when finished() is true.
//
// A job walks its chain part-major: the first layers of every block, then the next layers of every
// block, so that the layer stream of the whole prefix advances from the front. `cuts` come from
// BlockLayout::cut_layers; one part is the paper's Full Block read. What has landed is verified
// layer by layer in the same order, in small steps between the completions, so that reads go on
// meanwhile and the first layers are handed out first.
//
// An encoded file is read in one part into the tail of its slot. Its header then moves to the front
// and its layers to where they end with the Full Block; they are verified and decoded in order,
// each into its place, so that what a layer overwrites has been decoded before.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvtransfer/block_store.h"
#include "store/memory_tier.h"
#include "store/operation_table.h"

namespace kvtransfer {

struct ReadJob {
  std::vector<BlockId> chain;
  std::vector<uint32_t> slots;   // one per block
  std::vector<uint32_t> cuts;    // layer boundaries; at least {0, num_layers}
  bool for_memory_tier = false;  // a prefetch: what is read goes there
  // Layers [first, end) of one more block have landed.
  std::function<void(uint32_t first_layer, uint32_t end_layer)> on_landed;
  // Layers [first, end) of one more block have landed and verified.
  std::function<void(uint32_t first_layer, uint32_t end_layer)> on_layers;

  uint32_t num_parts() const noexcept { return static_cast<uint32_t>(cuts.size()) - 1; }
  // Blocks [0, good_blocks) are good so far; shrinks when a block turns out missing or bad.
  uint32_t good_blocks = 0;
  Outcome failure;       // the first one
  bool overdue = false;  // the mount hangs; what is in flight may stay so for ever
  bool finished() const noexcept {
    return in_flight == 0 && unverified.empty() && (aborted || next_part >= num_parts());
  }
  // Leading blocks whose every layer has landed and verified.
  uint32_t complete_blocks() const noexcept;

  // --- owned by BlockReader ---
  struct Block {
    int fd = -1;
    uint32_t parts_done = 0;
    uint32_t layers_done = 0;
    int64_t begin_ns = 0;
    bool opened = false;                  // the header page has landed and is right
    std::optional<uint32_t> memory_slot;  // of the memory tier: nothing is read
  };
  struct Unverified {
    uint32_t layer, end_layer, block;
    bool operator>(const Unverified& other) const noexcept {
      return std::pair(layer, block) > std::pair(other.layer, other.block);
    }
  };
  std::vector<Block> blocks;
  std::vector<std::string> paths;
  std::vector<Unverified> unverified;  // a heap, lowest layer first
  uint32_t next_part = 0;
  uint32_t next_block = 0;
  uint32_t in_flight = 0;
  bool aborted = false;
};

class BlockReader {
 public:
  // `tier` may be null.
  BlockReader(BlockStore& store, OperationTable& operations, BufferPool& pool, MemoryTier* tier)
      : store_(store), operations_(operations), pool_(pool), tier_(tier) {}

  void begin(ReadJob& job);
  // Bytes the next issue() would read, 0 when nothing can be issued now (all issued, or waiting for
  // headers).
  uint64_t next_bytes(const ReadJob& job) const noexcept;
  // Starts the next piece of a job. False when the queue is full or next_bytes() is 0.
  bool issue(ReadJob& job) noexcept;
  // No further pieces; finished() once what is in flight has completed.
  void abort(ReadJob& job, Outcome why) noexcept;

  void on_completion(const BlockOperation& operation, int64_t result) noexcept;
  void on_overdue(const BlockOperation& operation) noexcept;
  bool wants_verify() const noexcept { return !verifying_.empty(); }
  // Verifies up to about `budget_bytes` of what has landed.
  void verify(uint64_t budget_bytes) noexcept;

 private:
  void on_open(const BlockOperation& operation, int64_t result) noexcept;
  void on_read(const BlockOperation& operation, int64_t result) noexcept;
  bool read_part(ReadJob& job, uint32_t block, uint32_t part) noexcept;
  void wait_for_verify(ReadJob& job, uint32_t block, uint32_t first, uint32_t end) noexcept;
  bool verify_next(ReadJob& job) noexcept;
  void advance(ReadJob& job) noexcept;
  bool take_layer(ReadJob& job, uint32_t block, uint32_t layer) noexcept;
  void announce(ReadJob& job, uint32_t block, uint32_t first, uint32_t end) noexcept;
  void fail_block(ReadJob& job, uint32_t block, ErrorCode code, int error,
                  std::string why) noexcept;
  void finish_part(ReadJob& job, uint32_t block) noexcept;
  void close_files(ReadJob& job) noexcept;
  std::string describe(const ReadJob& job, uint32_t block) const;
  uint8_t* landing(const ReadJob& job, uint32_t block) const noexcept;
  uint8_t* stored_layers(const ReadJob& job, uint32_t block) const noexcept;
  void move_apart(const ReadJob& job, uint32_t block) noexcept;
  uint64_t part_begin(const ReadJob& job, uint32_t part) const noexcept;
  uint64_t part_end(const ReadJob& job, uint32_t part) const noexcept;

  BlockStore& store_;
  OperationTable& operations_;
  BufferPool& pool_;
  MemoryTier* tier_;
  std::vector<ReadJob*> verifying_;  // jobs with landed layers, oldest first
};

}  // namespace kvtransfer
