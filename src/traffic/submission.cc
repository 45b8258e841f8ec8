#include "traffic/submission.h"

namespace kvtransfer {

void require(bool condition, const std::string& what) {
  if (!condition) throw Error(ErrorCode::kInvalidArgument, "TrafficManager: " + what);
}

void check_slots(const BufferPool& pool, const std::vector<uint32_t>& slots) {
  for (const uint32_t slot : slots) {
    require(slot < pool.num_slots(),
            "slot " + std::to_string(slot) + " outside 0.." + std::to_string(pool.num_slots() - 1));
  }
}

void check_move(const MoveSpec& spec, MoveKind kind, const BlockLayout& layout,
                const BufferPool& pool, bool has_device) {
  check_slots(pool, spec.slots);
  require(!spec.into || spec.into->num_layers() == layout.num_layers(), "`into` has other layers");
  require(!spec.after || spec.after->num_layers() == layout.num_layers(),
          "`after` has other layers");
  if (kind == MoveKind::kServe) return;
  require(has_device && spec.cache != nullptr, "stage and push need a device cache");
  spec.cache->check_compatible(layout);
  if (kind == MoveKind::kStage) {
    for (const uint64_t start : spec.block_starts) {
      require(start <= pool.region()->bytes() &&
                  layout.full_block_bytes() <= pool.region()->bytes() - start,
              "a block at offset " + std::to_string(start) + " leaves the pool");
    }
  }
  std::vector<CopyRange> ranges;
  spec.cache->plan(layout,
                   {.first_token = spec.first_token,
                    .num_tokens = spec.num_tokens,
                    .pages = spec.pages,
                    .block_starts = spec.block_starts},
                   ranges);
}

}  // namespace kvtransfer
