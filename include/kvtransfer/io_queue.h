// IoQueue: asynchronous file operations with exact lengths. prepare -> submit -> poll.
//
// Two twins behind one contract: `uring` (io_uring: registered buffers, one system call for a
// batch) and `threads` (a small pool over pread/pwrite), which takes over where io_uring is denied
// (seccomp, kernel.io_uring_disabled, memlock). backend() and fallback_reason() say which one runs
// and why.
//
// Thread safety: none; one owner thread prepares, submits, polls and waits. Invariants:
//  1. A read or write completes with exactly `length` or with a negative errno. Short operations
//  are
//     resubmitted for their tail; an unexpected end of file is -ENODATA, a write that makes no
//     progress -EIO. EINTR and EAGAIN are retried.
//  2. `buffer` and the paths must stay alive until the completion was polled.
//  3. Completions carry the caller's user_data; a stale kernel completion (other generation) is
//     dropped and can't be taken for a newer operation.
//  4. The destructor waits until no operation can touch a buffer any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace kvtransfer {

enum class IoOp : uint8_t { kOpen, kRead, kWrite, kSync, kRename, kClose, kMakeDirectory, kUnlink };

struct IoRequest {
  IoOp op = IoOp::kRead;
  int fd = -1;                 // kRead, kWrite, kSync, kClose
  int flags = 0;               // kOpen: open(2) flags; kRename: renameat2(2) flags
  const char* path = nullptr;  // kOpen, kRename, kMakeDirectory, kUnlink
  const char* new_path = nullptr;
  void* buffer = nullptr;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t user_data = 0;
};

struct IoCompletion {
  uint64_t user_data;
  int64_t result;  // bytes moved, a descriptor (kOpen), 0, or -errno
};

enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

struct IoOptions {
  IoBackend backend = IoBackend::kAuto;
  uint32_t depth = 64;              // operations in flight
  uint32_t num_threads = 4;         // of the `threads` twin
  std::string prefer_threads = {};  // not empty: why kAuto takes the threads
};

// Memory that operations will use; registering it spares the kernel a pin per operation.
struct IoBuffer {
  void* data;
  size_t bytes;
};

class IoQueue {
 public:
  // kAuto takes io_uring if it works. An explicit backend that can't run throws Error(kUnsupported)
  // with the reason and what would enable it.
  static std::unique_ptr<IoQueue> create(const IoOptions& options,
                                         std::span<const IoBuffer> buffers = {});
  virtual ~IoQueue() = default;

  // False when `depth` operations are already prepared or in flight.
  virtual bool prepare(const IoRequest& request) noexcept = 0;
  // Makes everything prepared visible to the kernel or the workers: the doorbell.
  virtual void submit() noexcept = 0;
  // Takes up to out.size() completions; never blocks.
  virtual size_t poll(std::span<IoCompletion> out) noexcept = 0;
  // submit(), then sleeps until poll() may have something, one of `fds` is readable or the deadline
  // has passed; may also return for nothing. One system call where the kernel can.
  virtual void wait(std::span<const int> fds, int64_t deadline_ns) noexcept = 0;

  virtual uint32_t in_flight() const noexcept = 0;
  virtual uint32_t depth() const noexcept = 0;
  virtual std::string_view backend() const noexcept = 0;
  // What of the better kernels it uses, e.g. "single_issuer defer_taskrun"; for people.
  virtual std::string features() const { return {}; }
  // True when all of `buffers` are registered with the kernel.
  virtual bool buffers_registered() const noexcept = 0;

  // Empty, or why the better twin or registration isn't used.
  const std::string& fallback_reason() const noexcept { return fallback_reason_; }

 protected:
  std::string fallback_reason_;
};

}  // namespace kvtransfer
