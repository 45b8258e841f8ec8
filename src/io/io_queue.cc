#include "kvtransfer/io_queue.h"

#include "io/twins.h"
#include "kvtransfer/error.h"

namespace kvtransfer {

std::unique_ptr<IoQueue> IoQueue::create(const IoOptions& options,
                                         std::span<const IoBuffer> buffers) {
  if (options.depth == 0 || options.depth > 4096 || options.num_threads == 0 ||
      options.num_threads > 256) {
    throw Error(ErrorCode::kInvalidArgument,
                "IoQueue: depth must be 1..4096 and num_threads 1..256");
  }
  std::string reason;
  if (options.backend == IoBackend::kAuto && !options.prefer_threads.empty()) {
    return make_thread_queue(options, options.prefer_threads);
  }
  if (options.backend != IoBackend::kThreads) {
    if (auto queue = make_uring_queue(options, buffers, reason)) return queue;
    if (options.backend == IoBackend::kUring) throw Error(ErrorCode::kUnsupported, reason);
  }
  return make_thread_queue(options, reason);
}

}  // namespace kvtransfer
