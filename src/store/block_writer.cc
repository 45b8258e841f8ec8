#include "store/block_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <utility>

#include "base/clock.h"
#include "store/block_file.h"
#include "store/directory_scan.h"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE (1 << 0)
#endif

namespace kvtransfer {

namespace {

constexpr size_t kFanOut = 65536;
constexpr uint32_t kLeaf = 0, kRoot = 2;  // directory levels, upwards

const char* step_name(BlockStep step) {
  switch (step) {
    case BlockStep::kWriteOpen:
      return "open";
    case BlockStep::kMakeParent:
    case BlockStep::kMakeDirectory:
      return "mkdir";
    case BlockStep::kWrite:
      return "write";
    case BlockStep::kRename:
      return "rename";
    default:
      return "sync";
  }
}

}  // namespace

BlockWriter::BlockWriter(BlockStore& store, OperationTable& operations, BufferPool& pool)
    : store_(store), operations_(operations), pool_(pool) {
  std::random_device random;
  for (int i = 0; i < 4; ++i) token_ += std::to_string(random());
  if (store.options().durability == Durability::kFsync) fan_out_synced_.resize(kFanOut);
}

void BlockWriter::begin(WriteJob& job) {
  job.blocks = std::vector<WriteJob::Block>(job.chain.size());
  job.stored.assign(job.chain.size(), false);
  job.fresh.assign(job.chain.size(), false);
}

bool BlockWriter::issue(WriteJob& job) noexcept {
  while (job.next_block < job.chain.size()) {
    const uint32_t block = job.next_block;
    const BlockId& id = job.chain[block];
    WriteJob::Block& state = job.blocks[block];
    if (!job.failure.ok()) {  // a full disk fails the rest without trying
      ++job.next_block;
      continue;
    }
    if (store_.known(id)) {
      state.duplicate = true;
      finish(job, block, true);
      ++job.next_block;
      continue;
    }
    if (operations_.free() == 0) return false;
    if (!make_image(job, block)) {
      job.failure = {ErrorCode::kExhausted, ENOMEM, "writing a block: no memory to encode it in"};
      continue;
    }
    state.path = store_.path_of(id);
    state.temporary = store_.directory_of(id) + "/" + kTemporaryPrefix + token_ + "-" +
                      std::to_string(temporary_counter_++);
    state.begin_ns = now_ns();
    if (!open_temporary(job, block)) return false;
    ++job.next_block;
    return true;
  }
  return false;
}

uint8_t* BlockWriter::image_of(const WriteJob& job, uint32_t block) const noexcept {
  const auto& image = job.blocks[block].image;
  return image ? image.get() : pool_.slot_data(job.slots[block]);
}

bool BlockWriter::make_image(WriteJob& job, uint32_t block) noexcept {
  const BlockLayout& layout = store_.layout();
  const BlockEncoding& encoding = store_.options().encoding;
  if (!encoding.raw()) {
    auto* memory = static_cast<uint8_t*>(aligned_alloc(4096, store_.file_bytes()));
    if (memory == nullptr) return false;
    job.blocks[block].image.reset(memory);
    encoding.encode(pool_.slot_data(job.slots[block]) + store_.header_bytes(),
                    layout.full_block_bytes(), image_of(job, block) + store_.header_bytes());
  }
  const bool partial = block + 1 == job.chain.size() && job.valid_tokens_of_last != 0;
  write_header(image_of(job, block), store_, job.chain[block],
               partial ? job.valid_tokens_of_last : layout.block_tokens());
  return true;
}

// The steps below start one operation each. All but the first follow a completion, which freed an
// entry of the table, so they can't fail to start.

bool BlockWriter::open_temporary(WriteJob& job, uint32_t block) noexcept {
  const int direct = store_.direct_io() ? O_DIRECT : 0;
  return operations_.start({.step = BlockStep::kWriteOpen, .write = &job, .block = block},
                           {.op = IoOp::kOpen,
                            .flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | direct,
                            .path = job.blocks[block].temporary.c_str()});
}

void BlockWriter::make_directory(WriteJob& job, uint32_t block, BlockStep step) noexcept {
  BlockOperation operation{.step = step, .write = &job, .block = block};
  operation.path = directory_at(job.chain[block], step == BlockStep::kMakeParent ? 1 : kLeaf);
  operations_.start(std::move(operation), {.op = IoOp::kMakeDirectory});
}

void BlockWriter::write_payload(WriteJob& job, uint32_t block) noexcept {
  operations_.start({.step = BlockStep::kWrite, .write = &job, .block = block},
                    {.op = IoOp::kWrite,
                     .fd = job.blocks[block].fd,
                     .buffer = image_of(job, block),
                     .length = store_.file_bytes()});
}

void BlockWriter::sync_payload(WriteJob& job, uint32_t block) noexcept {
  operations_.start({.step = BlockStep::kSync, .write = &job, .block = block},
                    {.op = IoOp::kSync, .fd = job.blocks[block].fd});
}

void BlockWriter::rename_temporary(WriteJob& job, uint32_t block, bool no_replace) noexcept {
  const WriteJob::Block& state = job.blocks[block];
  operations_.start(
      {.step = BlockStep::kRename, .write = &job, .block = block, .part = no_replace ? 0u : 1u},
      {.op = IoOp::kRename,
       .flags = no_replace ? RENAME_NOREPLACE : 0,
       .path = state.temporary.c_str(),
       .new_path = state.path.c_str()});
}

void BlockWriter::open_directory(WriteJob& job, uint32_t block, uint32_t level) noexcept {
  BlockOperation operation{
      .step = BlockStep::kOpenDirectory, .write = &job, .block = block, .part = level};
  operation.path = directory_at(job.chain[block], level);
  operations_.start(std::move(operation),
                    {.op = IoOp::kOpen, .flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC});
}

void BlockWriter::published(WriteJob& job, uint32_t block) noexcept {
  if (store_.options().durability != Durability::kFsync) return finish(job, block, true);
  open_directory(job, block, kLeaf);
}

// The rename is durable once its directory is, and that once its own name is.
void BlockWriter::directory_synced(const BlockOperation& operation) noexcept {
  WriteJob& job = *operation.write;
  WriteJob::Block& state = job.blocks[operation.block];
  operations_.close(std::exchange(state.directory_fd, -1));
  const size_t fan_out = fan_out_index(job.chain[operation.block]);
  if (operation.part == kRoot) fan_out_synced_[fan_out] = true;
  if (fan_out_synced_[fan_out]) return finish(job, operation.block, true);
  open_directory(job, operation.block, operation.part + 1);
}

void BlockWriter::on_completion(const BlockOperation& operation, int64_t result) noexcept {
  WriteJob& job = *operation.write;
  WriteJob::Block& state = job.blocks[operation.block];
  // Descriptors are owned from the moment they exist, also by a block that was given up.
  if (operation.step == BlockStep::kWriteOpen && result >= 0) state.fd = static_cast<int>(result);
  if (operation.step == BlockStep::kOpenDirectory && result >= 0) {
    state.directory_fd = static_cast<int>(result);
  }
  if (state.ended) {  // it was overdue
    state.renamed |= operation.step == BlockStep::kRename && result >= 0;
    return finish(job, operation.block, false);
  }
  if (result >= 0) return step_done(operation);
  const int error = static_cast<int>(-result);
  if (try_otherwise(operation, error)) return;
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  fail(operation, full ? ErrorCode::kNoSpace : ErrorCode::kIo, error, strerror(error));
}

void BlockWriter::step_done(const BlockOperation& operation) noexcept {
  WriteJob& job = *operation.write;
  const uint32_t block = operation.block;
  switch (operation.step) {
    case BlockStep::kMakeParent:
      return make_directory(job, block, BlockStep::kMakeDirectory);
    case BlockStep::kMakeDirectory:
      open_temporary(job, block);
      return;
    case BlockStep::kWriteOpen:
      return write_payload(job, block);
    case BlockStep::kWrite:
      job.blocks[block].image.reset();
      if (store_.options().durability == Durability::kFsync) return sync_payload(job, block);
      return rename_temporary(job, block, true);
    case BlockStep::kSync:
      return rename_temporary(job, block, true);
    case BlockStep::kRename:
      job.blocks[block].renamed = true;
      return published(job, block);
    case BlockStep::kOpenDirectory:
      operations_.start({.step = BlockStep::kSyncDirectory,
                         .write = &job,
                         .block = block,
                         .part = operation.part},
                        {.op = IoOp::kSync, .fd = job.blocks[block].directory_fd});
      return;
    case BlockStep::kSyncDirectory:
      return directory_synced(operation);
    default:
      return;
  }
}

// What looks like an error and is none: the fan-out directory is missing or was made by another
// writer, another writer published the block first, or the file system has no renameat2 flags (NFS;
// existence was checked just before).
bool BlockWriter::try_otherwise(const BlockOperation& operation, int error) noexcept {
  WriteJob& job = *operation.write;
  WriteJob::Block& state = job.blocks[operation.block];
  switch (operation.step) {
    case BlockStep::kWriteOpen:
      if (error != ENOENT || state.made_directory) return false;
      state.made_directory = true;
      make_directory(job, operation.block, BlockStep::kMakeParent);
      return true;
    case BlockStep::kMakeParent:
    case BlockStep::kMakeDirectory:
      if (error != EEXIST) return false;
      step_done(operation);
      return true;
    case BlockStep::kRename:
      if (operation.part != 0) return false;
      if (error == EEXIST) {
        state.duplicate = true;
        published(job, operation.block);
        return true;
      }
      if (error != EINVAL && error != ENOSYS) return false;
      rename_temporary(job, operation.block, false);
      return true;
    default:
      return false;
  }
}

void BlockWriter::finish(WriteJob& job, uint32_t block, bool stored) noexcept {
  WriteJob::Block& state = job.blocks[block];
  for (int* fd : {&state.fd, &state.directory_fd}) {
    if (*fd >= 0) operations_.close(std::exchange(*fd, -1));
  }
  if (!state.renamed && !state.temporary.empty()) operations_.unlink(state.temporary);
  if (state.ended) return;
  state.ended = true;
  job.stored[block] = stored;
  job.fresh[block] = stored && !state.duplicate;
  if (!stored) return;
  store_.published(job.chain[block], state.duplicate);
  if (!state.duplicate) store_.record_write_latency(now_ns() - state.begin_ns);
}

void BlockWriter::fail(const BlockOperation& operation, ErrorCode code, int error,
                       const std::string& why) noexcept {
  WriteJob& job = *operation.write;
  if (job.failure.ok()) {
    job.failure = {code, error,
                   "writing " + job.blocks[operation.block].path + ": " +
                       step_name(operation.step) + ": " + why};
    store_.write_failed(why);
  }
  finish(job, operation.block, false);
}

// The operation stays in flight; when it comes back, its descriptor and temporary are disposed of.
void BlockWriter::on_overdue(const BlockOperation& operation) noexcept {
  WriteJob& job = *operation.write;
  WriteJob::Block& state = job.blocks[operation.block];
  const int64_t seconds = store_.mount().timeout_ns() / 1'000'000'000;
  job.overdue = true;
  if (job.failure.ok()) {
    job.failure = {ErrorCode::kTimeout, 0,
                   "writing " + state.path + ": " + step_name(operation.step) + ": no answer for " +
                       std::to_string(seconds) + " s"};
  }
  state.ended = true;
}

std::string BlockWriter::directory_at(const BlockId& id, uint32_t level) const {
  std::string path = store_.directory_of(id);
  for (; level > 0; --level) path.resize(path.rfind('/'));
  return path;
}

size_t BlockWriter::fan_out_index(const BlockId& id) const noexcept {
  return size_t{id.key[0]} << 8 | id.key[1];
}

}  // namespace kvtransfer
