// ShmListener: accepts shm peers. Its thread runs the handshakes, so that a peer that connects and
// stays silent delays nobody; the progress thread collects finished links.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "kvtransfer/link.h"
#include "transport/shm_wire.h"

namespace kvtransfer {

class ShmListener {
 public:
  // `self.regions` are what peers may reach; `local_regions` is our own region table, a superset.
  // `wake` is called from the listener's thread whenever a link is ready.
  ShmListener(std::string address, ShmIdentity self,
              std::vector<std::shared_ptr<MemoryRegion>> local_regions, std::function<void()> wake);
  ~ShmListener();

  const std::string& address() const noexcept { return address_; }
  // Links accepted since the last call. Any thread.
  std::vector<std::unique_ptr<Link>> take_accepted();
  // Connects to another listener. Blocking; throws Error.
  std::unique_ptr<Link> connect(const std::string& address, int64_t deadline_ns) const;

 private:
  void serve();

  std::string address_;
  ShmIdentity self_;
  std::vector<std::shared_ptr<MemoryRegion>> local_regions_;
  std::function<void()> wake_;
  Fd socket_;
  Fd stop_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Link>> accepted_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace kvtransfer
