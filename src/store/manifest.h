// Manifest: the file that says what a store directory is for.
//
//   kvtransfer block store, format 1
//   namespace <64 hex digits>
//   block_tokens 64
//   layers 30 x 192 192          a run of equal layers: how many, then the bytes per token of each
//                                plane; as many lines as there are runs
//   encoding fp8_of_bfloat16 64  only where blocks are not stored as they are (BlockEncoding)
#pragma once

#include <string>

#include "kvtransfer/block_layout.h"
#include "kvtransfer/block_store.h"

namespace kvtransfer {

struct Manifest {
  BlockKey name_space;
  BlockLayout layout;
  BlockEncoding encoding;
};

std::string manifest_text(const Manifest& manifest);
// Throws Error(kMismatch) with what is wrong, whatever the bytes.
Manifest parse_manifest(const std::string& text);
// Throws Error(kIo) when `root` has none.
std::string read_manifest(const std::string& root);

// Creates `root` and its manifest if need be; what is there already must be `text`.
Outcome open_store_directory(const std::string& root, const std::string& text);

inline constexpr char kManifestName[] = "KVTRANSFER";

}  // namespace kvtransfer
