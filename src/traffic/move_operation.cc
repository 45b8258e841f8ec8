// The layer-by-layer moves: stage, stage_from_peer, push, serve. One class: they differ in
// direction and medium only.
#include "device/host_copy.h"
#include "traffic/operation.h"

namespace kvtransfer {

namespace {

// Region indices in every engine's table.
constexpr uint16_t kPoolRegion = 0;
constexpr uint16_t kDeviceRegion = 1;

class MoveOperation final : public Operation {
 public:
  MoveOperation(MoveKind kind, MoveSpec spec, uint32_t num_layers)
      : Operation(spec.slots, spec.deadline_ns),
        kind_(kind),
        spec_(std::move(spec)),
        num_layers_(num_layers),
        batches_(num_layers) {}

  bool step(Progress& progress) noexcept override {
    bool progressed = collect(progress);
    if (stopping_) return progressed;
    if (spec_.after && spec_.after->failed() && !source_ready()) {
      fail(progress, spec_.after->failure());
      return true;
    }
    if (by_ring(progress) && !use_ring(progress)) return true;
    while (!stopping_ && next_layer_ < num_layers_ && may_start(progress)) {
      progressed = true;
      if (!move_layer(progress)) break;
      ++next_layer_;
      planned_ = false;
    }
    return progressed;
  }

  bool finished() const noexcept override {
    return first_unfinished_ == num_layers_ || (stopping_ && quiet());
  }

  void stop(Progress& progress, Outcome why) noexcept override {
    const bool timed_out = why.code == ErrorCode::kTimeout;
    // Requests that may still move bytes: only taking the link down ends them (docs/threading.md).
    if (timed_out && ring_ != nullptr && !quiet()) ring_->fail(why);
    fail(progress, std::move(why));
  }

  std::string describe() const override {
    static constexpr const char* kNames[] = {"stage", "stage from peer", "push", "serve"};
    std::string text = std::string(kNames[static_cast<size_t>(kind_)]) + " of layer " +
                       std::to_string(std::min(first_unfinished_, num_layers_ - 1)) + " of " +
                       std::to_string(num_layers_);
    return ring_ == nullptr ? text : text + " with peer " + ring_->link().peer();
  }

 private:
  bool quiet() const noexcept {
    return notice_.outstanding == 0 &&
           std::all_of(batches_.begin(), batches_.end(),
                       [](const RingBatch& b) { return b.outstanding == 0; });
  }
  bool source_ready() const noexcept {
    return next_layer_ >= num_layers_ || spec_.after->ready(next_layer_);
  }

  TrafficKind traffic_kind() const noexcept {
    switch (kind_) {
      case MoveKind::kStage:
        return TrafficKind::kDeviceCopy;
      case MoveKind::kStageFromPeer:
        return TrafficKind::kNetworkRead;
      default:
        return TrafficKind::kNetworkWrite;
    }
  }

  bool by_ring(const Progress& progress) const noexcept {
    return kind_ != MoveKind::kStage || progress.copy_peer.has_value();
  }

  WorkRing* find_ring(Progress& progress) const noexcept {
    return kind_ == MoveKind::kStage ? progress.peers->ring(*progress.copy_peer, TrafficClass::kKv)
                                     : progress.peers->ring(spec_.peer, spec_.traffic_class);
  }

  bool use_ring(Progress& progress) noexcept {
    if (ring_ == nullptr) ring_ = find_ring(progress);
    if (ring_ != nullptr && !ring_->failed()) return true;
    fail(progress, ring_ != nullptr
                       ? ring_->failure()
                       : Outcome{ErrorCode::kPeerLost, 0, "no peer " + std::to_string(spec_.peer)});
    return false;
  }

  // Source there, rotation slot free, bandwidth left. Plans the layer on the way.
  bool may_start(Progress& progress) noexcept {
    if (planned_) return true;  // started already; the ring was full
    if (spec_.after && !spec_.after->ready(next_layer_)) return false;
    if (spec_.gate) {
      const uint32_t rotation = spec_.cache->num_layers();
      if (next_layer_ >= rotation && !spec_.gate->ready(next_layer_ - rotation)) return false;
    }
    plan(progress);
    if (stopping_ || !progress.take(traffic_kind(), total_bytes(ranges_))) return false;
    planned_ = true;
    cursor_ = 0;
    batches_[next_layer_].begin_ns = progress.now_ns;
    return true;
  }

  void plan(Progress& progress) noexcept {
    ranges_.clear();
    if (kind_ == MoveKind::kServe) return;
    try {
      spec_.cache->plan(*progress.layout,
                        {.layer = next_layer_,
                         .cache_layer = next_layer_ % spec_.cache->num_layers(),
                         .first_token = spec_.first_token,
                         .num_tokens = spec_.num_tokens,
                         .pages = spec_.pages,
                         .block_starts = spec_.block_starts},
                        ranges_);
    } catch (const Error& error) {
      fail(progress, {error.code(), error.sys_errno(), error.what()});
    }
  }

  // True when the whole layer is moved (stage) or posted.
  bool move_layer(Progress& progress) noexcept {
    RingBatch& batch = batches_[next_layer_];
    batch.bytes = total_bytes(ranges_);
    if (!by_ring(progress)) {
      scatter_ranges(progress.device->data(), progress.pool->region()->data(), ranges_);
      batch.posted = true;
      collect(progress);
      return true;
    }
    for (; cursor_ < ranges_.size(); ++cursor_) {
      if (!post(batch, range_request(ranges_[cursor_]))) return false;
    }
    if (tells_peer() && !post(batch, immediate_request(next_layer_))) return false;
    batch.posted = true;
    ring_->doorbell();
    return true;
  }

  bool post(RingBatch& batch, const WorkRequest& request) noexcept {
    const uint32_t pieces = ring_->entries_for(request.length);
    batch.outstanding += pieces;
    if (ring_->post(request, reinterpret_cast<uint64_t>(&batch))) return true;
    batch.outstanding -= pieces;
    return false;
  }

  WorkRequest range_request(const CopyRange& range) const noexcept {
    WorkRequest request;
    request.length = range.length;
    if (kind_ == MoveKind::kStage) {  // from our pool to our device cache
      request.op = LinkOp::kWrite;
      request.local_region = kPoolRegion;
      request.local_offset = range.block_offset;
      request.remote_region = kDeviceRegion;
      request.remote_offset = range.cache_offset;
      return request;
    }
    request.op = kind_ == MoveKind::kPush ? LinkOp::kWrite : LinkOp::kRead;
    request.local_region = kDeviceRegion;
    request.local_offset = range.cache_offset;
    request.remote_region = kPoolRegion;
    request.remote_offset = range.block_offset;
    return request;
  }

  bool tells_peer() const noexcept { return kind_ == MoveKind::kPush || kind_ == MoveKind::kServe; }

  WorkRequest immediate_request(uint32_t layer) const noexcept {
    WorkRequest request;
    request.op = LinkOp::kWriteWithImmediate;
    request.immediate = pack_immediate(spec_.tag, layer);
    return request;
  }

  // Tells a receiver that waits for our immediates that no more will come.
  void send_notice(Progress& progress) noexcept {
    if (!tells_peer()) return;
    if (ring_ == nullptr) ring_ = find_ring(progress);
    if (ring_ != nullptr && post(notice_, immediate_request(kGaveUp))) ring_->doorbell();
  }

  // Reports layers whose requests have all retired, in order.
  bool collect(Progress& progress) noexcept {
    bool progressed = false;
    while (first_unfinished_ < num_layers_) {
      RingBatch& batch = batches_[first_unfinished_];
      if (batch.failed && !stopping_) {
        fail(progress, ring_->failure());
        return true;
      }
      if (!batch.posted || batch.outstanding > 0 || batch.failed) break;
      const auto layer = static_cast<int32_t>(first_unfinished_);
      progress.stats->record({batch.begin_ns, now_ns(), batch.bytes, spec_.trace_id, layer,
                              static_cast<int32_t>(traffic_kind())});
      add_bytes(batch.bytes);
      if (spec_.into && !stopping_) spec_.into->arrive(first_unfinished_);
      ++first_unfinished_;
      progressed = true;
    }
    return progressed;
  }

  void fail(Progress& progress, Outcome why) noexcept {
    if (stopping_) return;
    stopping_ = true;
    if (why.code != ErrorCode::kCancelled) progress.stats->record_failure(traffic_kind());
    send_notice(progress);
    if (spec_.into) spec_.into->fail(why);
    set_outcome(std::move(why));
  }

  const MoveKind kind_;
  const MoveSpec spec_;
  const uint32_t num_layers_;
  std::vector<RingBatch> batches_;  // per layer; addresses are cookies, so never resized
  RingBatch notice_;                // the negative acknowledgement
  std::vector<CopyRange> ranges_;   // of next_layer_, reused
  size_t cursor_ = 0;               // first range not posted yet
  bool planned_ = false;
  uint32_t next_layer_ = 0;
  uint32_t first_unfinished_ = 0;
  WorkRing* ring_ = nullptr;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Operation> make_move(MoveKind kind, MoveSpec spec, uint32_t num_layers) {
  return std::make_unique<MoveOperation>(kind, std::move(spec), num_layers);
}

}  // namespace kvtransfer
