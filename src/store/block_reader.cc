#include "store/block_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "store/block_file.h"

namespace kvtransfer {

uint32_t ReadJob::complete_blocks() const noexcept {
  uint32_t count = 0;
  while (count < good_blocks && blocks[count].layers_done == cuts.back()) ++count;
  return count;
}

void BlockReader::begin(ReadJob& job) {
  job.blocks.assign(job.chain.size(), {});
  job.good_blocks = static_cast<uint32_t>(job.chain.size());
  job.unverified.reserve(job.chain.size());
  if (!store_.options().encoding.raw()) job.cuts = {0, store_.layout().num_layers()};
  job.paths.clear();
  for (const BlockId& id : job.chain) job.paths.push_back(store_.path_of(id));
  if (job.chain.empty()) job.next_part = job.num_parts();
  if (tier_ == nullptr) return;
  for (uint32_t block = 0; block < job.chain.size(); ++block) {
    job.blocks[block].memory_slot = tier_->pin(job.chain[block].key);
    if (!job.blocks[block].memory_slot) continue;
    wait_for_verify(job, block, 0, job.cuts.back());
  }
  if (!job.chain.empty() && job.blocks[0].memory_slot) advance(job);
}

// Where a block's file image begins.
uint8_t* BlockReader::landing(const ReadJob& job, uint32_t block) const noexcept {
  return pool_.slot_data(job.slots[block]) + store_.slot_bytes() - store_.file_bytes();
}

uint8_t* BlockReader::stored_layers(const ReadJob& job, uint32_t block) const noexcept {
  const BlockLayout& layout = store_.layout();
  return pool_.slot_data(job.slots[block]) + store_.header_bytes() + layout.full_block_bytes() -
         store_.stored_offset(layout.num_layers());
}

void BlockReader::move_apart(const ReadJob& job, uint32_t block) noexcept {
  const uint8_t* image = landing(job, block);
  std::memmove(pool_.slot_data(job.slots[block]), image, store_.header_bytes());
  std::memmove(stored_layers(job, block), image + store_.header_bytes(),
               store_.stored_offset(store_.layout().num_layers()));
}

// To the next block and part that has to be read.
void BlockReader::advance(ReadJob& job) noexcept {
  do {
    if (++job.next_block >= job.good_blocks) {
      job.next_block = 0;
      ++job.next_part;
    }
  } while (job.next_part < job.num_parts() && job.blocks[job.next_block].memory_slot);
}

uint64_t BlockReader::part_begin(const ReadJob& job, uint32_t part) const noexcept {
  return part == 0 ? 0 : store_.header_bytes() + store_.layout().layer_offset(job.cuts[part]);
}

uint64_t BlockReader::part_end(const ReadJob& job, uint32_t part) const noexcept {
  return part + 1 == job.num_parts()
             ? store_.file_bytes()
             : store_.header_bytes() + store_.layout().layer_offset(job.cuts[part + 1]);
}

uint64_t BlockReader::next_bytes(const ReadJob& job) const noexcept {
  if (job.aborted || job.next_part >= job.num_parts()) return 0;
  if (job.next_part > 0 && !job.blocks[job.next_block].opened) return 0;
  return part_end(job, job.next_part) - part_begin(job, job.next_part);
}

bool BlockReader::issue(ReadJob& job) noexcept {
  if (next_bytes(job) == 0) return false;
  const uint32_t block = job.next_block;
  if (job.next_part > 0) {
    if (!read_part(job, block, job.next_part)) return false;
  } else {
    const int direct = store_.direct_io() ? O_DIRECT : 0;
    if (!operations_.start({.step = BlockStep::kReadOpen, .read = &job, .block = block},
                           {.op = IoOp::kOpen,
                            .flags = O_RDONLY | O_CLOEXEC | direct,
                            .path = job.paths[block].c_str()})) {
      return false;
    }
    job.blocks[block].begin_ns = now_ns();
  }
  advance(job);
  return true;
}

bool BlockReader::read_part(ReadJob& job, uint32_t block, uint32_t part) noexcept {
  const uint64_t begin = part_begin(job, part);
  return operations_.start({.step = BlockStep::kRead, .read = &job, .block = block, .part = part},
                           {.op = IoOp::kRead,
                            .fd = job.blocks[block].fd,
                            .buffer = landing(job, block) + begin,
                            .offset = begin,
                            .length = part_end(job, part) - begin});
}

void BlockReader::on_completion(const BlockOperation& operation, int64_t result) noexcept {
  ReadJob& job = *operation.read;
  if (operation.step == BlockStep::kReadOpen) on_open(operation, result);
  if (operation.step == BlockStep::kRead) on_read(operation, result);
  // A worker may still be reading from a file of a job that was given up, as long as anything is in
  // flight.
  if (job.aborted && job.in_flight == 0) close_files(job);
}

void BlockReader::on_open(const BlockOperation& operation, int64_t result) noexcept {
  ReadJob& job = *operation.read;
  if (result < 0) {
    const int error = static_cast<int>(-result);
    return fail_block(job, operation.block, error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo,
                      error, "open");
  }
  job.blocks[operation.block].fd = static_cast<int>(result);
  // Also after a failure further back: what is reported as good must have been read.
  if (operation.overdue || operation.block >= job.good_blocks) {
    return finish_part(job, operation.block);
  }
  // The completion just handled freed an entry, so this can't fail.
  read_part(job, operation.block, 0);
}

void BlockReader::on_read(const BlockOperation& operation, int64_t result) noexcept {
  ReadJob& job = *operation.read;
  const uint32_t block = operation.block, part = operation.part;
  if (operation.overdue) return finish_part(job, block);
  const uint64_t wanted = part_end(job, part) - part_begin(job, part);
  if (result != static_cast<int64_t>(wanted)) {
    const int error = static_cast<int>(-result);
    // An early end of file is a truncated block, not a failing device.
    const auto code = error == ENODATA ? ErrorCode::kCorrupt : ErrorCode::kIo;
    return fail_block(job, block, code, error,
                      "read of " + std::to_string(wanted) + " bytes at offset " +
                          std::to_string(part_begin(job, part)));
  }
  if (part == 0) {
    const std::string why = check_header(landing(job, block), store_, job.chain[block]);
    if (!store_.options().encoding.raw()) move_apart(job, block);
    if (!why.empty()) return fail_block(job, block, ErrorCode::kCorrupt, 0, "header: " + why);
    job.blocks[block].opened = true;
  }
  const uint32_t first = job.cuts[part], end = job.cuts[part + 1];
  if (!job.aborted && block < job.good_blocks) job.on_landed(first, end);
  store_.record_read_latency(now_ns() - job.blocks[block].begin_ns);
  finish_part(job, block);
  if (!store_.options().verify_checksums && store_.options().encoding.raw()) {
    return announce(job, block, first, end);
  }
  wait_for_verify(job, block, first, end);
}

void BlockReader::wait_for_verify(ReadJob& job, uint32_t block, uint32_t first,
                                  uint32_t end) noexcept {
  if (job.unverified.empty()) verifying_.push_back(&job);
  job.unverified.push_back({first, end, block});
  std::push_heap(job.unverified.begin(), job.unverified.end(), std::greater<>());
}

// Checks and decodes a layer that was read, or copies it from the memory tier, where it was checked
// before.
bool BlockReader::take_layer(ReadJob& job, uint32_t block, uint32_t layer) noexcept {
  uint8_t* to = pool_.slot_data(job.slots[block]);
  const auto memory = job.blocks[block].memory_slot;
  const uint64_t place = store_.header_bytes() + store_.layout().layer_offset(layer);
  if (!memory) {
    const uint8_t* stored = stored_layers(job, block) + store_.stored_offset(layer);
    const StoreOptions& options = store_.options();
    if (options.verify_checksums && !check_layer(to, stored, store_, layer)) return false;
    if (!options.encoding.raw()) {
      options.encoding.decode(stored, store_.layout().layer_bytes(layer), to + place);
    }
    return true;
  }
  const uint64_t begin = layer == 0 ? 0 : place;
  const uint64_t end = place + store_.layout().layer_bytes(layer);
  std::memcpy(to + begin, tier_->data(*memory) + begin, end - begin);
  return true;
}

void BlockReader::verify(uint64_t budget_bytes) noexcept {
  for (uint64_t done = 0; !verifying_.empty() && done < budget_bytes;) {
    ReadJob& job = *verifying_.front();
    done += store_.layout().layer_bytes(job.unverified.front().layer);
    if (!verify_next(job)) verifying_.erase(verifying_.begin());
  }
}

// Verifies the lowest layer that waits; false when the job has nothing more to verify for now.
bool BlockReader::verify_next(ReadJob& job) noexcept {
  auto& heap = job.unverified;
  std::pop_heap(heap.begin(), heap.end(), std::greater<>());
  ReadJob::Unverified& next = heap.back();
  const uint32_t layer = next.layer, block = next.block;
  const bool wanted = block < job.good_blocks;
  const bool good = wanted && take_layer(job, block, layer);
  if (good && ++next.layer < next.end_layer) {
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  } else {
    heap.pop_back();
    if (job.blocks[block].memory_slot) tier_->unpin(*job.blocks[block].memory_slot);
  }
  if (good) {
    announce(job, block, layer, layer + 1);
  } else if (wanted) {
    fail_block(job, block, ErrorCode::kCorrupt, 0,
               "checksum of layer " + std::to_string(layer) + " differs");
    if (job.in_flight == 0) close_files(job);
  }
  return !heap.empty();
}

void BlockReader::announce(ReadJob& job, uint32_t block, uint32_t first, uint32_t end) noexcept {
  ReadJob::Block& state = job.blocks[block];
  state.layers_done += end - first;
  if (tier_ != nullptr && !state.memory_slot && state.layers_done == job.cuts.back()) {
    tier_->offer(job.chain[block].key, pool_.slot_data(job.slots[block]), job.for_memory_tier);
  }
  if (!job.aborted && block < job.good_blocks) job.on_layers(first, end);
}

// One piece of `block` is through; closes the file after the last one.
void BlockReader::finish_part(ReadJob& job, uint32_t block) noexcept {
  ReadJob::Block& state = job.blocks[block];
  if (++state.parts_done == job.num_parts() && state.fd >= 0) {
    operations_.close(state.fd);
    state.fd = -1;
  }
}

std::string BlockReader::describe(const ReadJob& job, uint32_t block) const {
  return "block " + std::to_string(block) + " of " + std::to_string(job.chain.size()) + " (" +
         job.paths[block] + ")";
}

void BlockReader::fail_block(ReadJob& job, uint32_t block, ErrorCode code, int error,
                             std::string why) noexcept {
  const bool corrupt = code == ErrorCode::kCorrupt;
  store_.read_failed(job.chain[block], corrupt);
  if (corrupt && store_.options().remove_corrupt) {
    operations_.start_later({.step = BlockStep::kRemove, .read = &job, .block = block},
                            {.op = IoOp::kUnlink, .path = job.paths[block].c_str()});
  }
  if (block < job.good_blocks) {
    job.good_blocks = block;
    if (error != 0) why += std::string(": ") + strerror(error);
    job.failure = {code, error, describe(job, block) + ": " + why};
  }
  // The prefix before the bad block is still wanted only by a caller that starts over with it; this
  // job's stream can't complete any more, so nothing further is issued.
  job.aborted = true;
}

// The operation itself stays in flight, and so does the job.
void BlockReader::on_overdue(const BlockOperation& operation) noexcept {
  const int64_t seconds = store_.mount().timeout_ns() / 1'000'000'000;
  operation.read->overdue = true;
  fail_block(*operation.read, operation.block, ErrorCode::kTimeout, 0,
             std::string(operation.step == BlockStep::kReadOpen ? "open" : "read") +
                 ": no answer for " + std::to_string(seconds) + " s");
}

void BlockReader::close_files(ReadJob& job) noexcept {
  for (ReadJob::Block& block : job.blocks) {
    if (block.fd >= 0) operations_.close(block.fd);
    block.fd = -1;
  }
}

void BlockReader::abort(ReadJob& job, Outcome why) noexcept {
  if (job.failure.ok()) {  // a bad block's good prefix stays; else nothing is claimed
    job.failure = std::move(why);
    job.good_blocks = 0;
  }
  job.aborted = true;
  if (job.in_flight == 0) close_files(job);
}

}  // namespace kvtransfer
