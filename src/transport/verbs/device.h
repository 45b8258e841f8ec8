// VerbsDevice: one opened device and port, its protection domain and what it can do.
//
// Thread safety: immutable after construction but for lost(), which any thread may ask.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "kvtransfer/verbs.h"
#include "transport/verbs/api.h"

namespace kvtransfer {

class VerbsDevice {
 public:
  // Throws Error(kUnsupported | kInvalidArgument).
  VerbsDevice(const VerbsApi& api, const VerbsOptions& options);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;

  const VerbsApi& api() const noexcept { return api_; }
  const VerbsOptions& options() const noexcept { return options_; }
  ibv_context* context() const noexcept { return context_; }
  // For registrations, and for queue pairs: the parent domain where there is one.
  ibv_pd* pd() const noexcept { return pd_; }
  ibv_pd* queue_pair_pd() const noexcept { return parent_ != nullptr ? parent_ : pd_; }
  bool has_thread_domain() const noexcept { return thread_domain_ != nullptr; }
  const std::string& name() const noexcept { return name_; }
  uint8_t port() const noexcept { return options_.port; }
  const ibv_gid& gid() const noexcept { return gid_; }
  uint8_t gid_index() const noexcept { return gid_index_; }
  uint16_t lid() const noexcept { return lid_; }
  bool is_ethernet() const noexcept { return ethernet_; }
  ibv_mtu mtu() const noexcept { return mtu_; }
  uint32_t max_message_bytes() const noexcept { return max_message_bytes_; }
  uint8_t rd_atomic_out() const noexcept { return rd_atomic_out_; }
  uint8_t rd_atomic_in() const noexcept { return rd_atomic_in_; }
  uint32_t max_queue_depth() const noexcept { return max_queue_depth_; }
  uint32_t max_completions() const noexcept { return max_completions_; }
  // "rxe0 port 1 gid 1 (::ffff:10.77.0.1)", for messages.
  std::string describe() const;

  // Readable when poll_events() has something.
  int event_fd() const noexcept { return context_->async_fd; }
  void poll_events() noexcept;
  // The device was removed or reported a fatal error: its queue pairs will not speak again.
  bool lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

 private:
  void choose_port();
  void choose_gid();

  const VerbsApi& api_;
  const VerbsOptions options_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_td* thread_domain_ = nullptr;
  ibv_pd* parent_ = nullptr;
  std::string name_;
  ibv_gid gid_{};
  uint8_t gid_index_ = 0;
  uint16_t lid_ = 0;
  bool ethernet_ = false;
  ibv_mtu mtu_ = IBV_MTU_1024;
  uint32_t max_message_bytes_ = 0;
  uint8_t rd_atomic_out_ = 1;
  uint8_t rd_atomic_in_ = 1;
  uint32_t max_queue_depth_ = 0;
  uint32_t max_completions_ = 0;
  std::atomic<bool> lost_{false};
};

std::string gid_text(const ibv_gid& gid);
uint32_t mtu_bytes(ibv_mtu mtu);

}  // namespace kvtransfer
