// Reading a store's directory: which blocks lie there, which temporaries have been left behind.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvtransfer/block_store.h"

namespace kvtransfer {

inline constexpr char kTemporaryPrefix[] = ".tmp-";

// "<key>-<parent>.kvb": both keys are in the name, so that a scan need not open any file.
std::string block_name(const BlockId& id);
std::optional<BlockId> id_from_name(std::string_view name);
// Of exactly 64 lower-case digits.
std::optional<BlockKey> key_from_hex(std::string_view hex);

struct DirectoryScan {
  std::vector<std::pair<BlockId, uint64_t>> blocks;  // with their file times, ns since 1970
  uint64_t swept_temporaries = 0;
};

// kNames believes the directories: it asks nothing of a block's file, and all file times are 0.
// That is what opening wants, as the inodes of a million cold files take twice as long as their
// names.
enum class ScanDetail : uint8_t { kNames, kFiles };

// Blocks under the two-level fan-out of `root`; with kFiles those of exactly `file_bytes`. Removes
// temporaries, and with kFiles blocks of another size, that are older than `stale_seconds`. Several
// threads, because a cold directory waits for the device. What can't be read is left out: a scan is
// a hint, reads check everything.
DirectoryScan scan_directory(const std::string& root, uint64_t file_bytes, uint32_t stale_seconds,
                             ScanDetail detail);

}  // namespace kvtransfer
