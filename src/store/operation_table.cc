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

bool OperationTable::start(BlockOperation operation, IoRequest request) noexcept {
  if (free_.empty()) return false;
  const uint32_t index = free_.back();
  BlockOperation& record = records_[index];
  record = std::move(operation);
  record.begin_ns = now_ns();
  request.user_data = index;
  if (!record.path.empty()) request.path = record.path.c_str();
  if (!queue_.prepare(request)) return false;
  free_.pop_back();
  busy_[index] = true;
  if (uint32_t* count = count_of(record)) ++*count;
  writes_in_flight_ += record.write != nullptr ? 1 : 0;
  return true;
}

void OperationTable::close(int fd) noexcept {
  if (!start({}, {.op = IoOp::kClose, .fd = fd})) ::close(fd);
}

void OperationTable::unlink(std::string path) noexcept {
  BlockOperation operation;
  operation.path = path;
  if (!start(std::move(operation), {.op = IoOp::kUnlink})) ::unlink(path.c_str());
}

size_t OperationTable::poll(std::vector<Completion>& out) noexcept {
  IoCompletion completions[64];
  const size_t count = queue_.poll(completions);
  out.clear();
  for (size_t i = 0; i < count; ++i) {
    const auto index = static_cast<uint32_t>(completions[i].user_data);
    BlockOperation& record = records_[index];
    if (record.overdue) mount_.came_back();
    free_.push_back(index);
    busy_[index] = false;
    writes_in_flight_ -= record.write != nullptr ? 1 : 0;
    if (uint32_t* in_flight = count_of(record)) {
      --*in_flight;
      out.push_back({record, completions[i].result});
    }
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
