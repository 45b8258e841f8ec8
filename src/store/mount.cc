#include "store/mount.h"

#include <stdio.h>
#include <sys/prctl.h>

#include <thread>

namespace kvtransfer {

Mount::Mount(std::string root, int64_t timeout_ns)
    : timeout_ns_(timeout_ns), health_(std::make_shared<Health>()) {
  health_->root = std::move(root);
}

Mount::~Mount() = default;

void Mount::post(std::function<void()> work) {
  if (timeout_ns_ == 0) return work();
  questions_.push(std::move(work));
}

void Mount::overdue() noexcept {
  health_->add();
}

void Mount::came_back() noexcept {
  health_->remove();
}

// A waiter may give up a moment after its work came back: add() and remove() may come in any order.
void Mount::Health::add() noexcept {
  if (overdue.fetch_add(1, std::memory_order_acq_rel) == 0) {
    fprintf(stderr, "kvtransfer: store %s doesn't answer: its blocks are misses until it does\n",
            root.c_str());
  }
}

void Mount::Health::remove() noexcept {
  if (overdue.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    fprintf(stderr, "kvtransfer: store %s answers again\n", root.c_str());
  }
}

Mount::Worker::~Worker() {
  if (!state_) return;
  const std::lock_guard lock(state_->mutex);
  state_->stopping = true;
  state_->wake.notify_all();
}

void Mount::Worker::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (!state_) {
    state_ = std::make_shared<State>();
    std::thread([state = state_] { loop(state); }).detach();
  }
  const std::lock_guard inner(state_->mutex);
  state_->work.push_back(std::move(work));
  state_->wake.notify_one();
}

void Mount::Worker::loop(const std::shared_ptr<State>& state) {
  prctl(PR_SET_NAME, "kvt-mount");
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->wake.wait(lock, [&] { return state->stopping || !state->work.empty(); });
    if (state->work.empty()) return;
    const auto work = std::move(state->work.front());
    state->work.pop_front();
    lock.unlock();
    work();
    lock.lock();
  }
}

}  // namespace kvtransfer
