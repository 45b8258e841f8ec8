// OperationTable: the file operations of one IoQueue that are in flight for blocks.
//
// Thread safety: none; belongs to the IoQueue's owner thread. Invariants:
//  1. An operation that is longer in flight than the mount's timeout is reported once (overdue); it
//     stays in the table, and its job counts it in flight, until the kernel gives it back.
//  2. Descriptors and temporaries that are of no more use are closed and removed by operations, so
//     that the owner thread never waits for the mount.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "kvtransfer/io_queue.h"
#include "store/mount.h"

namespace kvtransfer {

struct ReadJob;
struct WriteJob;

enum class BlockStep : uint8_t {
  kReadOpen,
  kRead,
  kRemove,  // a corrupt file, to make room for its recomputed block
  kWriteOpen,
  kMakeParent,
  kMakeDirectory,
  kWrite,
  kSync,
  kRename,
  kOpenDirectory,
  kSyncDirectory,
  kDispose,  // nobody's: a close or an unlink
};

struct BlockOperation {
  BlockStep step = BlockStep::kDispose;
  ReadJob* read = nullptr;
  WriteJob* write = nullptr;
  uint32_t block = 0;
  uint32_t part = 0;  // a reader's part, a writer's directory level or try
  int64_t begin_ns = 0;
  bool overdue = false;
  std::string path = {};  // what is made, opened or unlinked, where no job holds the name
};

class OperationTable {
 public:
  OperationTable(IoQueue& queue, Mount& mount);

  uint32_t free() const noexcept { return static_cast<uint32_t>(free_.size()); }
  uint32_t writes_in_flight() const noexcept { return writes_in_flight_; }
  uint32_t capacity() const noexcept { return static_cast<uint32_t>(records_.size()); }

  // False when no entry is free. While a completion is handled, one is: it starts at most one
  // operation this way.
  bool start(BlockOperation operation, IoRequest request) noexcept;
  // Starts now or when an entry is free that nobody counts on; its job waits for it from now on.
  void start_later(BlockOperation operation, IoRequest request) noexcept;
  // Gives a descriptor or a temporary up.
  void close(int fd) noexcept;
  void unlink(std::string path) noexcept;

  // Calls `handle(operation, result)` for each completion of a job's operation, whose job has it no
  // longer in flight. Returns how many completions there were, disposals included.
  template <typename Handle>
  size_t poll(Handle handle) noexcept {
    const size_t count = take_completions();
    for (; !completions_.empty(); completions_.pop_back()) {
      const auto& [operation, result] = completions_.back();
      handle(operation, result);
    }
    start_waiting();
    return count;
  }
  // Operations that have just become overdue. Looks at most four times per timeout.
  void take_overdue(int64_t now, std::vector<BlockOperation>& out) noexcept;
  // When take_overdue() should be called next; kNoDeadline with nothing in flight.
  int64_t next_look_ns() const noexcept;

 private:
  struct Completion {
    BlockOperation operation;
    int64_t result;
  };
  struct Waiting {
    BlockOperation operation;
    IoRequest request;
  };
  size_t take_completions() noexcept;
  void start_waiting() noexcept;
  bool place(BlockOperation& operation, IoRequest& request) noexcept;

  IoQueue& queue_;
  Mount& mount_;
  std::vector<BlockOperation> records_;  // user_data is the index
  std::vector<bool> busy_;
  std::vector<uint32_t> free_;
  std::vector<Completion> completions_;  // not handled yet; each may start one operation
  std::deque<Waiting> waiting_;          // for an entry
  uint32_t writes_in_flight_ = 0;
  int64_t next_look_ns_ = 0;
};

}  // namespace kvtransfer
