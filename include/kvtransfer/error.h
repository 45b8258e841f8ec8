// Error: the one exception of the cold path (open, register, connect, configure).
//
// The hot path never throws: its functions are noexcept and failures arrive as completions that
// carry the same codes. what() names what was attempted and with which operands, so that a log line
// is enough to act on.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kvtransfer {

enum class ErrorCode : uint8_t {
  kNone = 0,
  kInvalidArgument,  // the caller's operands make no sense; nothing was done
  kIo,               // a system call on a file failed; see sys_errno()
  kNoSpace,          // the device or the byte cap is full; reads go on
  kCorrupt,          // bytes that fail their checksum or header check
  kNotFound,         // a block or path that is not there (any more)
  kMismatch,         // a store, peer or blob of another version, namespace or layout
  kTimeout,          // a deadline passed
  kPeerLost,         // the other process or its link is gone
  kExhausted,        // a bounded resource (pool, queue) has not enough left
  kUnsupported,      // this kernel, machine or build cannot do it
  kCancelled,        // withdrawn by the caller
};

// The stable lower-case word for a code, e.g. "no_space".
std::string_view error_code_name(ErrorCode code) noexcept;

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what, int sys_errno = 0);

  ErrorCode code() const noexcept { return code_; }
  // The errno behind it, or 0.
  int sys_errno() const noexcept { return sys_errno_; }

 private:
  ErrorCode code_;
  int sys_errno_;
};

// How an asynchronous operation ended. `code == kNone` is success. The text names peer, block,
// layer, offset, wanted and got, as far as they apply.
struct Outcome {
  ErrorCode code = ErrorCode::kNone;
  int sys_errno = 0;
  std::string text;

  bool ok() const noexcept { return code == ErrorCode::kNone; }
};

}  // namespace kvtransfer
