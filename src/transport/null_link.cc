#include "transport/null_link.h"

#include <errno.h>

#include <algorithm>
#include <array>

namespace kvtransfer {

namespace {

constexpr uint32_t kSendDepth = 256;

class NullLink final : public Link {
 public:
  std::string_view backend() const noexcept override { return "null"; }
  const std::string& peer() const noexcept override { return peer_; }
  uint64_t peer_epoch() const noexcept override { return 0; }
  LinkLimits limits() const noexcept override { return {kSendDepth, uint64_t{1} << 31, true}; }
  uint64_t remote_region_bytes(uint16_t) const noexcept override { return UINT64_MAX; }

  PostResult post(std::span<const WorkRequest> list) noexcept override {
    if (failed_) return {0, ECONNRESET};
    for (const WorkRequest& request : list) {
      if (request.signalled) ready_[num_ready_++ % kSendDepth] = request.wr_id;
    }
    return {list.size(), 0};
  }
  size_t poll(std::span<WorkCompletion> out) noexcept override {
    size_t count = 0;
    while (count < out.size() && num_taken_ < num_ready_) {
      out[count++] = {ready_[num_taken_++ % kSendDepth], WorkStatus::kSuccess};
    }
    return count;
  }
  size_t poll_immediates(std::span<uint32_t>) noexcept override { return 0; }
  void fail() noexcept override { failed_ = true; }
  bool failed() const noexcept override { return failed_; }
  bool drained() const noexcept override { return failed_ && num_taken_ == num_ready_; }
  int event_fd() const noexcept override { return -1; }
  bool arm() noexcept override { return num_taken_ == num_ready_; }

 private:
  std::string peer_ = "nobody";
  std::array<uint64_t, kSendDepth> ready_{};  // no more than the depth is ever outstanding
  uint64_t num_ready_ = 0;
  uint64_t num_taken_ = 0;
  bool failed_ = false;
};

}  // namespace

std::unique_ptr<Link> make_null_link() {
  return std::make_unique<NullLink>();
}

}  // namespace kvtransfer
