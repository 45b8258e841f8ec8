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
  uint64_t payload_bytes;  // of the Full Block, without padding
  uint32_t num_layers;
  uint32_t block_tokens;
  uint32_t valid_tokens;  // <= block_tokens
  uint32_t reserved;
  uint64_t header_checksum;  // of all header pages with this field zero
};
static_assert(sizeof(BlockHeader) == 152);

constexpr uint32_t header_pages_bytes(uint32_t num_layers) {
  return (static_cast<uint32_t>(sizeof(BlockHeader)) + num_layers * 8 + 4095) / 4096 * 4096;
}

// Fills the header pages at `slot` for the Full Block behind them (checksums every layer) and
// zeroes the padding after it.
void write_header(uint8_t* slot, uint64_t slot_bytes, const BlockStore& store, const BlockId& id,
                  uint32_t valid_tokens) noexcept;

// Empty when the header pages at `slot` are intact and belong to `id` in this store; else why not.
// Never reads beyond store.header_bytes() whatever the bytes say.
std::string check_header(const uint8_t* slot, const BlockStore& store, const BlockId& id);

// True when layer `layer` of the Full Block behind the header has the checksum the header names.
bool check_layer(const uint8_t* slot, const BlockStore& store, uint32_t layer) noexcept;

std::string to_hex(std::span<const uint8_t> bytes);

}  // namespace kvtransfer
