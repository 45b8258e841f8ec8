#include "store/store_io.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "store/block_file.h"
#include "store/directory_scan.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE (1 << 0)
#endif

namespace kvtransfer {

StoreIo::StoreIo(BlockStore& store, IoQueue& queue, BufferPool& pool)
    : store_(store), queue_(queue), pool_(pool), records_(queue.depth()) {
  if (pool.header_bytes() != store.header_bytes() || pool.slot_bytes() < store.file_bytes()) {
    throw Error(ErrorCode::kMismatch, "BlockStore: the pool's slots (" +
                                          std::to_string(pool.slot_bytes()) +
                                          " bytes) don't fit block files of " +
                                          std::to_string(store.file_bytes()) + " bytes");
  }
  for (uint32_t i = queue.depth(); i-- > 0;) free_records_.push_back(i);
}

bool StoreIo::start(const Record& record, IoRequest request) noexcept {
  if (free_records_.empty()) return false;
  const uint32_t index = free_records_.back();
  request.user_data = index;
  if (!queue_.prepare(request)) return false;
  free_records_.pop_back();
  records_[index] = record;
  ++(record.read != nullptr ? record.read->in_flight : record.write->in_flight);
  return true;
}

size_t StoreIo::poll() noexcept {
  IoCompletion completions[64];
  const size_t count = queue_.poll(completions);
  for (size_t i = 0; i < count; ++i) {
    const auto index = static_cast<uint32_t>(completions[i].user_data);
    const Record record = records_[index];
    free_records_.push_back(index);
    --(record.read != nullptr ? record.read->in_flight : record.write->in_flight);
    handle(record, completions[i].result);
    if (record.read != nullptr && record.read->finished()) close_files(*record.read);
  }
  return count;
}

void StoreIo::handle(const Record& record, int64_t result) noexcept {
  switch (record.step) {
    case Step::kReadOpen:
      return on_read_open(record, result);
    case Step::kRead:
      return on_read(record, result);
    default:
      return on_write_step(record, result);
  }
}

// ---------------------------------------------------------------------------------- reading

void StoreIo::begin(ReadJob& job) {
  job.blocks.assign(job.chain.size(), {});
  job.good_blocks = static_cast<uint32_t>(job.chain.size());
  job.paths.clear();
  for (const BlockId& id : job.chain) job.paths.push_back(store_.path_of(id));
  if (job.chain.empty()) job.next_part = job.num_parts();
}

uint64_t StoreIo::part_begin(const ReadJob& job, uint32_t part) const noexcept {
  return part == 0 ? 0 : store_.header_bytes() + store_.layout().layer_offset(job.cuts[part]);
}

uint64_t StoreIo::part_end(const ReadJob& job, uint32_t part) const noexcept {
  return part + 1 == job.num_parts()
             ? store_.file_bytes()
             : store_.header_bytes() + store_.layout().layer_offset(job.cuts[part + 1]);
}

uint64_t StoreIo::next_bytes(const ReadJob& job) const noexcept {
  if (job.aborted || job.next_part >= job.num_parts()) return 0;
  if (job.next_part > 0 && !job.blocks[job.next_block].opened) return 0;
  return part_end(job, job.next_part) - part_begin(job, job.next_part);
}

bool StoreIo::issue(ReadJob& job) noexcept {
  if (next_bytes(job) == 0) return false;
  const uint32_t block = job.next_block;
  if (job.next_part > 0) {
    if (!read_part(job, block, job.next_part)) return false;
  } else {
    const int direct = store_.direct_io() ? O_DIRECT : 0;
    if (!start({Step::kReadOpen, &job, nullptr, block, 0}, {.op = IoOp::kOpen,
                                                            .flags = O_RDONLY | O_CLOEXEC | direct,
                                                            .path = job.paths[block].c_str()})) {
      return false;
    }
  }
  if (++job.next_block >= job.good_blocks) {
    job.next_block = 0;
    ++job.next_part;
  }
  return true;
}

bool StoreIo::read_part(ReadJob& job, uint32_t block, uint32_t part) noexcept {
  const uint64_t begin = part_begin(job, part);
  return start({Step::kRead, &job, nullptr, block, part},
               {.op = IoOp::kRead,
                .fd = job.blocks[block].fd,
                .buffer = pool_.slot_data(job.slots[block]) + begin,
                .offset = begin,
                .length = part_end(job, part) - begin});
}

void StoreIo::on_read_open(const Record& record, int64_t result) noexcept {
  ReadJob& job = *record.read;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    return fail_block(job, record.block, error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo,
                      error, "open");
  }
  job.blocks[record.block].fd = static_cast<int>(result);
  // Also after a failure further back: what is reported as good must have been read.
  if (record.block >= job.good_blocks) return finish_part(job, record.block);
  // The completion just handled freed an entry, so this can't fail.
  read_part(job, record.block, 0);
}

void StoreIo::on_read(const Record& record, int64_t result) noexcept {
  ReadJob& job = *record.read;
  const uint8_t* slot = pool_.slot_data(job.slots[record.block]);
  const uint64_t wanted = part_end(job, record.part) - part_begin(job, record.part);
  if (result != static_cast<int64_t>(wanted)) {
    const int error = static_cast<int>(-result);
    // An early end of file is a truncated block, not a failing device.
    const auto code = error == ENODATA ? ErrorCode::kCorrupt : ErrorCode::kIo;
    return fail_block(job, record.block, code, error,
                      "read of " + std::to_string(wanted) + " bytes at offset " +
                          std::to_string(part_begin(job, record.part)));
  }
  if (record.part == 0) {
    const std::string why = check_header(slot, store_, job.chain[record.block]);
    if (!why.empty())
      return fail_block(job, record.block, ErrorCode::kCorrupt, 0, "header: " + why);
    job.blocks[record.block].opened = true;
  }
  const uint32_t first = job.cuts[record.part];
  const uint32_t end = job.cuts[record.part + 1];
  for (uint32_t layer = first; store_.options().verify_checksums && layer < end; ++layer) {
    if (!check_layer(slot, store_, layer)) {
      return fail_block(job, record.block, ErrorCode::kCorrupt, 0,
                        "checksum of layer " + std::to_string(layer) + " differs");
    }
  }
  if (!job.aborted && record.block < job.good_blocks) job.on_layers(first, end);
  finish_part(job, record.block);
}

// One piece of `block` is through; closes the file after the last one. The files of a job that was
// given up are closed when nothing of it is in flight: a worker may still be reading from them.
void StoreIo::finish_part(ReadJob& job, uint32_t block) noexcept {
  ReadJob::Block& state = job.blocks[block];
  if (++state.parts_done == job.num_parts() && state.fd >= 0) {
    close(state.fd);
    state.fd = -1;
  }
}

std::string StoreIo::describe(const ReadJob& job, uint32_t block) const {
  return "block " + std::to_string(block) + " of " + std::to_string(job.chain.size()) + " (" +
         job.paths[block] + ")";
}

void StoreIo::fail_block(ReadJob& job, uint32_t block, ErrorCode code, int error,
                         std::string why) noexcept {
  store_.read_failed(job.chain[block], code == ErrorCode::kCorrupt);
  if (block < job.good_blocks) {
    job.good_blocks = block;
    if (error != 0) why += std::string(": ") + strerror(error);
    job.failure = {code, error, describe(job, block) + ": " + why};
  }
  // The prefix before the bad block is still wanted only by a caller that starts over with it; this
  // job's stream can't complete any more, so nothing further is issued.
  job.aborted = true;
  finish_part(job, block);
}

void StoreIo::close_files(ReadJob& job) noexcept {
  for (ReadJob::Block& block : job.blocks) {
    if (block.fd >= 0) close(block.fd);
    block.fd = -1;
  }
}

void StoreIo::abort(ReadJob& job, Outcome why) noexcept {
  if (job.failure.ok()) {  // a bad block's good prefix stays; else nothing is claimed
    job.failure = std::move(why);
    job.good_blocks = 0;
  }
  job.aborted = true;
  if (job.in_flight == 0) close_files(job);
}

uint32_t StoreIo::read_now(std::span<const BlockId> chain, std::span<const uint32_t> slots) {
  ReadJob job;
  job.chain.assign(chain.begin(), chain.end());
  job.slots.assign(slots.begin(), slots.end());
  job.cuts = {0, store_.layout().num_layers()};
  job.on_layers = [](uint32_t, uint32_t) {};
  begin(job);
  while (!job.finished()) {
    while (issue(job)) {
    }
    queue_.submit();
    if (poll() == 0 && job.in_flight > 0) {
      pollfd ready{queue_.event_fd(), POLLIN, 0};
      ::poll(&ready, 1, 100);
    }
  }
  return job.good_blocks;
}

// ---------------------------------------------------------------------------------- writing

void StoreIo::begin(WriteJob& job) {
  job.blocks.assign(job.chain.size(), {});
  job.stored.assign(job.chain.size(), false);
  job.fresh.assign(job.chain.size(), false);
}

uint32_t StoreIo::valid_tokens(const WriteJob& job, uint32_t block) const noexcept {
  const bool partial = block + 1 == job.chain.size() && job.valid_tokens_of_last != 0;
  return partial ? job.valid_tokens_of_last : store_.layout().block_tokens();
}

bool StoreIo::issue(WriteJob& job) noexcept {
  while (job.next_block < job.chain.size()) {
    const uint32_t block = job.next_block;
    const BlockId& id = job.chain[block];
    if (!job.failure.ok()) {  // a full disk fails the rest without trying
      ++job.next_block;
      continue;
    }
    if (store_.contains(id)) {
      finish_write(job, block, true, true);
      ++job.next_block;
      continue;
    }
    if (free_records_.empty()) return false;
    write_header(pool_.slot_data(job.slots[block]), pool_.slot_bytes(), store_, id,
                 valid_tokens(job, block));
    WriteJob::Block& state = job.blocks[block];
    state.path = store_.path_of(id);
    state.temporary = store_.directory_of(id) + "/" + kTemporaryPrefix + std::to_string(getpid()) +
                      "-" + std::to_string(reinterpret_cast<uintptr_t>(this)) + "-" +
                      std::to_string(++temporary_counter_);
    if (!open_temporary(job, block)) return false;
    ++job.next_block;
    return true;
  }
  return false;
}

bool StoreIo::open_temporary(WriteJob& job, uint32_t block) noexcept {
  const int direct = store_.direct_io() ? O_DIRECT : 0;
  return start({Step::kWriteOpen, nullptr, &job, block, 0},
               {.op = IoOp::kOpen,
                .flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | direct,
                .path = job.blocks[block].temporary.c_str()});
}

void StoreIo::on_write_step(const Record& record, int64_t result) noexcept {
  WriteJob& job = *record.write;
  WriteJob::Block& state = job.blocks[record.block];
  if (record.step == Step::kWriteOpen && result >= 0) state.fd = static_cast<int>(result);
  if (result < 0) {
    if (record.step == Step::kRename && result == -EEXIST) {
      return finish_write(job, record.block, true, true);  // another writer was first
    }
    if (!retry_write(record, result)) fail_write(record, static_cast<int>(-result));
    return;
  }
  if (!next_write_step(record)) finish_write(job, record.block, true, false);
}

// Starts what follows a step that succeeded; false after the last. Never fails to start: the
// completion just handled freed an entry.
bool StoreIo::next_write_step(const Record& record) noexcept {
  WriteJob& job = *record.write;
  WriteJob::Block& state = job.blocks[record.block];
  const bool durable = store_.options().durability == Durability::kFsync;
  const auto rename = [&] {
    return start({Step::kRename, nullptr, &job, record.block, 0}, {.op = IoOp::kRename,
                                                                   .flags = RENAME_NOREPLACE,
                                                                   .path = state.temporary.c_str(),
                                                                   .new_path = state.path.c_str()});
  };
  switch (record.step) {
    case Step::kWriteOpen:
      return start({Step::kWrite, nullptr, &job, record.block, 0},
                   {.op = IoOp::kWrite,
                    .fd = state.fd,
                    .buffer = pool_.slot_data(job.slots[record.block]),
                    .length = store_.file_bytes()});
    case Step::kWrite:
      if (!durable) return rename();
      return start({Step::kWriteSync, nullptr, &job, record.block, 0},
                   {.op = IoOp::kSync, .fd = state.fd});
    case Step::kWriteSync:
      return record.part == 0 && rename();
    case Step::kRename: {
      if (!durable) return false;
      close(state.fd);
      // The rename is durable once its directory is.
      state.fd = open(store_.directory_of(job.chain[record.block]).c_str(), O_RDONLY | O_CLOEXEC);
      return state.fd >= 0 && start({Step::kWriteSync, nullptr, &job, record.block, 1},
                                    {.op = IoOp::kSync, .fd = state.fd});
    }
    default:
      return false;
  }
}

// Second tries that are not errors: the fan-out directory is missing, or the file system has no
// renameat2 flags (NFS) and existence was checked just before.
bool StoreIo::retry_write(const Record& record, int64_t result) noexcept {
  WriteJob& job = *record.write;
  WriteJob::Block& state = job.blocks[record.block];
  if (record.step == Step::kWriteOpen && result == -ENOENT && !state.made_directory) {
    state.made_directory = true;
    const std::string directory = store_.directory_of(job.chain[record.block]);
    mkdir(directory.substr(0, directory.rfind('/')).c_str(), 0755);
    mkdir(directory.c_str(), 0755);
    return open_temporary(job, record.block);
  }
  if (record.step == Step::kRename && record.part == 0 &&
      (result == -EINVAL || result == -ENOSYS)) {
    return start(
        {Step::kRename, nullptr, &job, record.block, 1},
        {.op = IoOp::kRename, .path = state.temporary.c_str(), .new_path = state.path.c_str()});
  }
  return false;
}

void StoreIo::finish_write(WriteJob& job, uint32_t block, bool published, bool duplicate) noexcept {
  WriteJob::Block& state = job.blocks[block];
  if (state.fd >= 0) {
    close(state.fd);
    state.fd = -1;
  }
  if ((!published || duplicate) && !state.temporary.empty()) unlink(state.temporary.c_str());
  job.stored[block] = published;
  job.fresh[block] = published && !duplicate;
  if (published) store_.published(job.chain[block], duplicate);
}

void StoreIo::fail_write(const Record& record, int error) noexcept {
  static constexpr const char* kNames[] = {"", "", "open", "write", "sync", "rename"};
  WriteJob& job = *record.write;
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  if (job.failure.ok()) {
    job.failure = {full ? ErrorCode::kNoSpace : ErrorCode::kIo, error,
                   "writing " + job.blocks[record.block].path + ": " +
                       kNames[static_cast<size_t>(record.step)] + ": " + strerror(error)};
    store_.write_failed(error);
  }
  finish_write(job, record.block, false, false);
}

uint32_t StoreIo::write_now(std::span<const BlockId> chain, std::span<const uint32_t> slots,
                            uint32_t valid_tokens_of_last) {
  WriteJob job;
  uint32_t admitted = 0;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (!store_.contains(chain[i])) {
      if (!store_.admit_write()) break;
      ++admitted;
    }
    job.chain.push_back(chain[i]);
    job.slots.push_back(slots[i]);
  }
  if (job.chain.size() == chain.size()) job.valid_tokens_of_last = valid_tokens_of_last;
  begin(job);
  while (!job.finished()) {
    while (issue(job)) {
    }
    queue_.submit();
    if (poll() == 0 && job.in_flight > 0) {
      pollfd ready{queue_.event_fd(), POLLIN, 0};
      ::poll(&ready, 1, 100);
    }
  }
  store_.end_writes(admitted);
  return static_cast<uint32_t>(std::count(job.stored.begin(), job.stored.end(), true));
}

}  // namespace kvtransfer
