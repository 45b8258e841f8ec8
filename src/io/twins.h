// The constructors of the two IoQueue twins; IoQueue::create chooses.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "kvtransfer/io_queue.h"

namespace kvtransfer {

// nullptr with `reason` when io_uring can't be used here.
std::unique_ptr<IoQueue> make_uring_queue(const IoOptions& options,
                                          std::span<const IoBuffer> buffers, std::string& reason);
std::unique_ptr<IoQueue> make_thread_queue(const IoOptions& options, std::string fallback_reason);

}  // namespace kvtransfer
