// The header page of a block file: building and checking. docs/block_format.md draws it.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kvtransfer/block_layout.h"
#include "kvtransfer/block_store.h"

namespace kvtransfer {

constexpr uint32_t kBlockFormatVersion = 2;  // 2: checksums in four lanes (base/checksum.h)

// On disk, little-endian, at offset 0; followed by one checksum per layer and, at the very end of
// the header pages, nothing: the rest is zero.
struct BlockHeader {
  uint8_t magic[8];  // "KVTBLOCK"
  uint32_t version;
  uint32_t header_bytes;  // a multiple of 4096
  uint8_t name_space[32];
  uint8_t key[32];
  uint8_t parent[32];
  uint64_t layout_digest;
  uint64_t payload_bytes;  // as stored, without padding
  uint32_t num_layers;
  uint32_t block_tokens;
  uint32_t valid_tokens;     // <= block_tokens
  uint32_t encoding;         // BlockEncoding::code()
  uint64_t header_checksum;  // of all header pages with this field zero
};
static_assert(sizeof(BlockHeader) == 152);

constexpr uint32_t header_pages_bytes(uint32_t num_layers) {
  return (static_cast<uint32_t>(sizeof(BlockHeader)) + num_layers * 8 + 4095) / 4096 * 4096;
}

// A file's `image` is header pages, stored layers, padding: store.file_bytes() in all.
// Fills in the header pages for the layers behind them (checksums every one) and zeroes the
// padding.
void write_header(uint8_t* image, const BlockStore& store, const BlockId& id,
                  uint32_t valid_tokens) noexcept;

// Empty when the header pages are intact and belong to `id` in this store; else why not.
// Never reads beyond store.header_bytes() whatever the bytes say.
std::string check_header(const uint8_t* at, const BlockStore& store, const BlockId& id);

// True when the stored bytes of layer `layer` at `stored` have the checksum the header names.
bool check_layer(const uint8_t* header, const uint8_t* stored, const BlockStore& store,
                 uint32_t layer) noexcept;

std::string to_hex(std::span<const uint8_t> bytes);

}  // namespace kvtransfer
