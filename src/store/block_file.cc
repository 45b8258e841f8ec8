#include "store/block_file.h"

#include <cstring>

#include "base/checksum.h"

namespace kvtransfer {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "block files are little-endian");

namespace {

constexpr char kMagic[] = "KVTBLOCK";

uint64_t header_checksum(const uint8_t* at, uint32_t header_bytes) noexcept {
  constexpr size_t kBefore = offsetof(BlockHeader, header_checksum);
  constexpr size_t kAfter = kBefore + sizeof(uint64_t);
  return checksum(at + kAfter, header_bytes - kAfter, checksum(at, kBefore));
}

uint64_t layer_checksum(const uint8_t* stored, const BlockStore& store, uint32_t layer) noexcept {
  // The layer index is the seed: two layers swapped inside a block do not verify.
  return checksum(stored, store.stored_offset(layer + 1) - store.stored_offset(layer), layer + 1);
}

}  // namespace

void write_header(uint8_t* image, const BlockStore& store, const BlockId& id,
                  uint32_t valid_tokens) noexcept {
  const BlockLayout& layout = store.layout();
  const uint32_t header_bytes = store.header_bytes();
  const uint64_t payload_bytes = store.stored_offset(layout.num_layers());
  const uint64_t payload_end = header_bytes + payload_bytes;
  std::memset(image, 0, header_bytes);
  std::memset(image + payload_end, 0, store.file_bytes() - payload_end);
  BlockHeader header{};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.version = kBlockFormatVersion;
  header.header_bytes = header_bytes;
  std::memcpy(header.name_space, store.name_space().data(), 32);
  std::memcpy(header.key, id.key.data(), 32);
  std::memcpy(header.parent, id.parent.data(), 32);
  header.layout_digest = layout.digest();
  header.payload_bytes = payload_bytes;
  header.num_layers = layout.num_layers();
  header.block_tokens = layout.block_tokens();
  header.valid_tokens = valid_tokens;
  header.encoding = store.options().encoding.code();
  for (uint32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const uint8_t* stored = image + header_bytes + store.stored_offset(layer);
    const uint64_t sum = layer_checksum(stored, store, layer);
    std::memcpy(image + sizeof header + layer * sizeof sum, &sum, sizeof sum);
  }
  std::memcpy(image, &header, sizeof header);
  header.header_checksum = header_checksum(image, header_bytes);
  std::memcpy(image, &header, sizeof header);
}

std::string check_header(const uint8_t* at, const BlockStore& store, const BlockId& id) {
  BlockHeader header;
  std::memcpy(&header, at, sizeof header);
  const BlockLayout& layout = store.layout();
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) != 0) return "not a block file";
  if (header.version != kBlockFormatVersion) {
    return "format version " + std::to_string(header.version) + ", this build reads " +
           std::to_string(kBlockFormatVersion);
  }
  if (header.header_bytes != store.header_bytes()) return "wrong header size";
  if (header.header_checksum != header_checksum(at, store.header_bytes())) {
    return "header checksum differs";
  }
  if (std::memcmp(header.name_space, store.name_space().data(), 32) != 0) return "other namespace";
  if (std::memcmp(header.key, id.key.data(), 32) != 0) return "other block's key";
  if (std::memcmp(header.parent, id.parent.data(), 32) != 0) return "other parent";
  if (header.layout_digest != layout.digest() || header.num_layers != layout.num_layers() ||
      header.block_tokens != layout.block_tokens() ||
      header.payload_bytes != store.stored_offset(layout.num_layers())) {
    return "other layout";
  }
  if (header.encoding != store.options().encoding.code()) return "other encoding";
  if (header.valid_tokens == 0 || header.valid_tokens > header.block_tokens) {
    return "impossible token count";
  }
  return {};
}

bool check_layer(const uint8_t* header, const uint8_t* stored, const BlockStore& store,
                 uint32_t layer) noexcept {
  uint64_t wanted;
  std::memcpy(&wanted, header + sizeof(BlockHeader) + layer * sizeof wanted, sizeof wanted);
  return wanted == layer_checksum(stored, store, layer);
}

std::string to_hex(std::span<const uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace kvtransfer
