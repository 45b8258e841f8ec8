// Mount: the file system a store lies on, which may stop answering.
//
// Calls that block (stat, statvfs, a directory scan) run in threads of their own, so that a mount
// that hangs costs a caller one deadline and never its thread. While an operation is overdue the
// mount is `slow`: the store is a miss then, and asks no more of it; when the last overdue
// operation has come back it is used again.
//
// Thread safety: all methods may be called from any thread. Work must own what it uses: it may
// outlive its caller and the store.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"

namespace kvtransfer {

class Mount {
 public:
  // `timeout_ns` 0: nothing is ever overdue and everything runs in the caller's thread.
  Mount(std::string root, int64_t timeout_ns);
  ~Mount();  // a thread that hangs is left to itself

  int64_t timeout_ns() const noexcept { return timeout_ns_; }
  bool slow() const noexcept { return health_->overdue.load(std::memory_order_acquire) > 0; }

  // A short question. Empty when the mount is slow or doesn't answer within the timeout.
  template <typename Result>
  std::optional<Result> ask(std::function<Result()> work) {
    return run(questions_, std::move(work), timeout_ns_);
  }
  // Work on the whole directory, which may take kPatience times as long.
  template <typename Result>
  std::optional<Result> sweep(std::function<Result()> work) {
    return run(sweeps_, std::move(work), timeout_ns_ * kPatience);
  }
  // Nobody waits for it.
  void post(std::function<void()> work);

  // For operations that run elsewhere (an IoQueue): one has passed the timeout; it has come back.
  void overdue() noexcept;
  void came_back() noexcept;

  static constexpr int64_t kPatience = 20;

 private:
  struct Health {
    std::string root;
    std::atomic<uint32_t> overdue{0};  // release pairs with slow()
    void add() noexcept;
    void remove() noexcept;
  };
  // One thread, started by its first work.
  class Worker {
   public:
    ~Worker();
    void push(std::function<void()> work);

   private:
    struct State {
      std::mutex mutex;
      std::condition_variable wake;
      std::deque<std::function<void()>> work;  // guarded by mutex
      bool stopping = false;                   // guarded by mutex
    };
    static void loop(const std::shared_ptr<State>& state);
    std::mutex mutex_;  // guards state_
    std::shared_ptr<State> state_;
  };

  template <typename Result>
  std::optional<Result> run(Worker& worker, std::function<Result()> work, int64_t timeout_ns) {
    if (timeout_ns_ == 0) return work();
    if (slow()) return std::nullopt;
    // Exactly one side sees the other: the waiter that gives up, or the work that is back in time.
    struct Call {
      std::promise<Result> promise;
      std::atomic<bool> decided{false};
    };
    auto call = std::make_shared<Call>();
    auto future = call->promise.get_future();
    worker.push([call, health = health_, work = std::move(work)] {
      call->promise.set_value(work());
      if (call->decided.exchange(true)) health->remove();
    });
    if (future.wait_for(std::chrono::nanoseconds(timeout_ns)) == std::future_status::ready ||
        call->decided.exchange(true)) {
      return future.get();
    }
    health_->add();
    return std::nullopt;
  }

  const int64_t timeout_ns_;
  std::shared_ptr<Health> health_;
  Worker questions_;
  Worker sweeps_;
};

}  // namespace kvtransfer
