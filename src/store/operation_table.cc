#include "store/operation_table.h"

#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "store/block_reader.h"
#include "store/block_writer.h"

namespace kvtransfer {

OperationTable::OperationTable(IoQueue& queue, Mount& mount)
    : queue_(queue), mount_(mount), records_(queue.depth()), busy_(queue.depth()) {
  for (uint32_t i = queue.depth(); i-- > 0;) free_.push_back(i);
}

namespace {

uint32_t* count_of(const BlockOperation& operation) noexcept {
  if (operation.read != nullptr) return &operation.read->in_flight;
  return operation.write != nullptr ? &operation.write->in_flight : nullptr;
}

}  // namespace

bool OperationTable::place(BlockOperation& operation, IoRequest& request) noexcept {
  if (free_.empty()) return false;
  const uint32_t index = free_.back();
  BlockOperation& record = records_[index];
  record = std::move(operation);
  record.begin_ns = now_ns();
  if (!record.path.empty()) request.path = record.path.c_str();
  request.user_data = index;
  if (!queue_.prepare(request)) {
    operation = std::move(record);
    return false;
  }
  free_.pop_back();
  busy_[index] = true;
  return true;
}

bool OperationTable::start(BlockOperation operation, IoRequest request) noexcept {
  uint32_t* count = count_of(operation);
  const bool writes = operation.write != nullptr;
  if (!place(operation, request)) return false;
  if (count != nullptr) ++*count;
  writes_in_flight_ += writes ? 1 : 0;
  return true;
}

void OperationTable::start_later(BlockOperation operation, IoRequest request) noexcept {
  if (uint32_t* count = count_of(operation)) ++*count;
  writes_in_flight_ += operation.write != nullptr ? 1 : 0;
  waiting_.push_back({std::move(operation), request});
  if (completions_.empty()) start_waiting();
}

void OperationTable::start_waiting() noexcept {
  while (!waiting_.empty() && place(waiting_.front().operation, waiting_.front().request)) {
    waiting_.pop_front();
  }
}

void OperationTable::close(int fd) noexcept {
  start_later({}, {.op = IoOp::kClose, .fd = fd});
}

void OperationTable::unlink(std::string path) noexcept {
  BlockOperation operation;
  operation.path = std::move(path);
  start_later(std::move(operation), {.op = IoOp::kUnlink});
}

size_t OperationTable::take_completions() noexcept {
  IoCompletion found[64];
  const size_t count = queue_.poll(found);
  for (size_t i = count; i-- > 0;) {  // handled from the back
    const auto index = static_cast<uint32_t>(found[i].user_data);
    BlockOperation& record = records_[index];
    if (record.overdue) mount_.came_back();
    free_.push_back(index);
    busy_[index] = false;
    writes_in_flight_ -= record.write != nullptr ? 1 : 0;
    uint32_t* in_flight = count_of(record);
    if (in_flight == nullptr) continue;
    --*in_flight;
    completions_.push_back({record, found[i].result});
  }
  return count;
}

void OperationTable::take_overdue(int64_t now, std::vector<BlockOperation>& out) noexcept {
  out.clear();
  const int64_t timeout = mount_.timeout_ns();
  if (timeout == 0 || now < next_look_ns_) return;
  next_look_ns_ = now + timeout / 4;
  for (size_t i = 0; i < records_.size(); ++i) {
    BlockOperation& record = records_[i];
    if (!busy_[i] || record.overdue || now - record.begin_ns < timeout) continue;
    record.overdue = true;
    mount_.overdue();
    if (count_of(record) != nullptr) out.push_back(record);
  }
}

int64_t OperationTable::next_look_ns() const noexcept {
  const bool idle = free_.size() == records_.size() || mount_.timeout_ns() == 0;
  return idle ? kNoDeadline : next_look_ns_;
}

}  // namespace kvtransfer
