// BlockLayout: where each byte of a Full Block lies.
//
// A Full Block is the Layer Blocks of all layers, one after another. A Layer Block is its planes,
// one after another, and a plane is `[block_tokens, bytes_per_token]`. With a single plane (packed
// K and V, or MLA) a Layer Block is exactly `[tokens, bytes]`; with K and V apart, or a plane per
// head, the planes keep the engine's own runs contiguous, so that a copy is one run a plane and not
// one a token (docs/decisions/0001).
//
//   Full Block   | layer 0                      | layer 1                      | ...
//   Layer Block  | plane 0 [T, b0] | plane 1 [T, b1] | ...
//
// Immutable after construction, so any thread may read it. All sizes are in bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtransfer {

class BlockLayout {
 public:
  // Bounds that keep every product below 2^63 and every wire field in range.
  static constexpr uint32_t kMaxLayers = 1023;  // a layer index travels in 10 bits of an immediate
  static constexpr uint32_t kMaxBlockTokens = 1 << 16;
  static constexpr uint32_t kMaxPlanes = 4096;
  static constexpr uint32_t kMaxPlaneBytes = 1 << 24;

  // Every layer alike: `plane_bytes[p]` is what plane p stores per token.
  // Throws Error(kInvalidArgument) for empty or out-of-range sizes.
  BlockLayout(uint32_t num_layers, uint32_t block_tokens, const std::vector<uint32_t>& plane_bytes);
  // Layers of different sizes (hybrid models): `layers[l][p]` bytes per token.
  BlockLayout(uint32_t block_tokens, std::vector<std::vector<uint32_t>> layers);

  uint32_t num_layers() const noexcept { return static_cast<uint32_t>(planes_.size()); }
  uint32_t block_tokens() const noexcept { return block_tokens_; }
  uint32_t num_planes(uint32_t layer) const noexcept {
    return static_cast<uint32_t>(planes_[layer].size());
  }
  // Bytes per token of one plane.
  uint32_t plane_bytes(uint32_t layer, uint32_t plane) const noexcept {
    return planes_[layer][plane];
  }
  // REQUIRES: layer <= num_layers(); layer_offset(num_layers()) == full_block_bytes().
  uint64_t layer_offset(uint32_t layer) const noexcept { return offsets_[layer]; }
  uint64_t layer_bytes(uint32_t layer) const noexcept {
    return offsets_[layer + 1] - offsets_[layer];
  }
  uint64_t full_block_bytes() const noexcept { return offsets_.back(); }
  // KV bytes of one token over all layers.
  uint64_t bytes_per_token() const noexcept { return full_block_bytes() / block_tokens_; }

  // Boundaries [0, ..., num_layers] that cut a Full Block into at most `parts` runs of whole
  // layers, of about equal size, each starting on a multiple of `alignment` bytes. Storage may then
  // read a prefix layer by layer (docs/decisions/0002). Fewer parts come back where alignment
  // forbids more.
  std::vector<uint32_t> cut_layers(uint32_t parts, uint32_t alignment) const;

  // Equal for equal layouts only (up to 64-bit collisions); written into block files.
  uint64_t digest() const noexcept { return digest_; }
  // For messages, e.g. "12 layers x 64 tokens x 512 B".
  std::string to_string() const;

  bool operator==(const BlockLayout& other) const noexcept {
    return block_tokens_ == other.block_tokens_ && planes_ == other.planes_;
  }

 private:
  uint32_t block_tokens_;
  std::vector<std::vector<uint32_t>> planes_;
  std::vector<uint64_t> offsets_;
  uint64_t digest_;
};

}  // namespace kvtransfer
