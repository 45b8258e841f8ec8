// libFuzzer target: bytes of a store that somebody else may have written. `make fuzz` runs it.
//
// The first byte picks the parser; the rest is what it gets: the header pages of a block, a file
// name, a manifest.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "store/block_file.h"
#include "store/directory_scan.h"
#include "store/manifest.h"

using namespace kvtransfer;

namespace {

const BlockLayout kLayout(3, 8, {64, 32});

const BlockStore& store() {
  static const auto opened = [] {
    StoreOptions options;
    options.operation_timeout_ms = 0;
    const std::string root = std::filesystem::temp_directory_path() / "kvtransfer-fuzz";
    return std::make_unique<BlockStore>(root, BlockKey{1}, kLayout, options);
  }();
  return *opened;
}

void check(bool condition) {
  if (!condition) __builtin_trap();
}

// Makes the header checksum right again, as who forges a block would.
void seal(std::vector<uint8_t>& slot) {
  constexpr size_t kAt = offsetof(BlockHeader, header_checksum);
  const uint64_t head = checksum(slot.data(), kAt);
  const uint64_t sum = checksum(slot.data() + kAt + 8, store().header_bytes() - kAt - 8, head);
  std::memcpy(slot.data() + kAt, &sum, sizeof sum);
}

// A slot exactly as long as a block file: any read beyond it is seen by AddressSanitizer.
void block(const uint8_t* data, size_t size, bool sealed) {
  std::vector<uint8_t> slot(store().file_bytes());
  const BlockId id{BlockKey{2}, BlockKey{3}};
  write_header(slot.data(), store(), id, 8);
  check(check_header(slot.data(), store(), id).empty());
  const std::vector<uint8_t> right = slot;
  // Pieces of the input replace pieces of a right block: [offset, length, bytes] ...
  while (size >= 3) {
    const size_t offset = static_cast<size_t>(data[0] << 8 | data[1]) % slot.size();
    const size_t length = std::min<size_t>({data[2], size - 3, slot.size() - offset});
    std::memcpy(slot.data() + offset, data + 3, length);
    data += 3 + length;
    size -= 3 + length;
  }
  if (sealed) seal(slot);
  // What is accepted is this block of this store in this format, whatever else was changed.
  const size_t same = sealed ? offsetof(BlockHeader, valid_tokens) : store().header_bytes();
  if (check_header(slot.data(), store(), id).empty()) {
    check(std::equal(right.begin(), right.begin() + static_cast<ptrdiff_t>(same), slot.begin()));
  }
  for (uint32_t layer = 0; layer < kLayout.num_layers(); ++layer) {
    check_layer(slot.data(), slot.data() + store().header_bytes() + store().stored_offset(layer),
                store(), layer);
  }
}

void name(const std::string& text) {
  const auto id = id_from_name(text);
  check(!id || block_name(*id) == text);
}

void manifest(const std::string& text) {
  try {
    check(manifest_text(parse_manifest(text)) == text);
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 1), size - 1);
  switch (data[0] % 4) {
    case 0:
    case 3:
      block(data + 1, size - 1, data[0] % 4 == 3);
      break;
    case 1:
      name(text);
      break;
    default:
      manifest(text);
  }
  return 0;
}
