#include "kvtransfer/block_layout.h"

#include <algorithm>

#include "base/checksum.h"
#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, "BlockLayout: " + what);
}

uint64_t digest_of(uint32_t block_tokens, const std::vector<std::vector<uint32_t>>& planes) {
  uint64_t digest = checksum(&block_tokens, sizeof block_tokens);
  for (const auto& layer : planes) {
    digest = checksum(layer.data(), layer.size() * sizeof(uint32_t), digest);
  }
  return digest;
}

std::vector<std::vector<uint32_t>> uniform(uint32_t num_layers,
                                           const std::vector<uint32_t>& plane_bytes) {
  require(num_layers >= 1 && num_layers <= BlockLayout::kMaxLayers,
          "num_layers must be 1.." + std::to_string(BlockLayout::kMaxLayers) + ", got " +
              std::to_string(num_layers));
  return std::vector<std::vector<uint32_t>>(num_layers, plane_bytes);
}

}  // namespace

BlockLayout::BlockLayout(uint32_t num_layers, uint32_t block_tokens,
                         const std::vector<uint32_t>& plane_bytes)
    : BlockLayout(block_tokens, uniform(num_layers, plane_bytes)) {}

BlockLayout::BlockLayout(uint32_t block_tokens, std::vector<std::vector<uint32_t>> layers)
    : block_tokens_(block_tokens), planes_(std::move(layers)) {
  require(block_tokens_ >= 1 && block_tokens_ <= kMaxBlockTokens,
          "block_tokens must be 1.." + std::to_string(kMaxBlockTokens) + ", got " +
              std::to_string(block_tokens_));
  require(!planes_.empty() && planes_.size() <= kMaxLayers,
          "num_layers must be 1.." + std::to_string(kMaxLayers) + ", got " +
              std::to_string(planes_.size()));
  offsets_.push_back(0);
  for (const auto& layer : planes_) {
    require(!layer.empty() && layer.size() <= kMaxPlanes,
            "a layer needs 1.." + std::to_string(kMaxPlanes) + " planes");
    uint64_t bytes = 0;
    for (const uint32_t plane : layer) {
      require(plane >= 1 && plane <= kMaxPlaneBytes, "a plane's bytes per token must be 1.." +
                                                         std::to_string(kMaxPlaneBytes) + ", got " +
                                                         std::to_string(plane));
      bytes += uint64_t{plane} * block_tokens_;
    }
    offsets_.push_back(offsets_.back() + bytes);
  }
  require(full_block_bytes() <= uint64_t{1} << 40, "a Full Block may have at most 2^40 bytes");
  digest_ = digest_of(block_tokens_, planes_);
}

std::vector<uint32_t> BlockLayout::cut_layers(uint32_t parts, uint32_t alignment) const {
  std::vector<uint32_t> cuts = {0};
  parts = std::clamp<uint32_t>(parts, 1, num_layers());
  for (uint32_t part = 1; part < parts; ++part) {
    const uint64_t target = full_block_bytes() * part / parts;
    uint32_t layer = cuts.back() + 1;
    while (layer < num_layers() &&
           (layer_offset(layer) < target || layer_offset(layer) % alignment != 0)) {
      ++layer;
    }
    if (layer >= num_layers()) break;
    cuts.push_back(layer);
  }
  cuts.push_back(num_layers());
  return cuts;
}

std::string BlockLayout::to_string() const {
  std::string text = std::to_string(num_layers()) + " layers x " + std::to_string(block_tokens_) +
                     " tokens x " + std::to_string(layer_bytes(0) / block_tokens_) + " B";
  const bool alike =
      std::all_of(planes_.begin(), planes_.end(), [&](const auto& p) { return p == planes_[0]; });
  return alike ? text + " in " + std::to_string(num_planes(0)) + " planes"
               : text + " (layers differ)";
}

}  // namespace kvtransfer
