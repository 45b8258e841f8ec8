// PeerListener: turns control sockets into links, on both sides. Its thread runs the handshakes of
// peers that connect, so that one that stays silent delays nobody; the progress thread collects
// finished links.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "kvtransfer/link.h"
#include "transport/control_socket.h"
#include "transport/shm_wire.h"

namespace kvtransfer {

class VerbsDomain;

// The links to one peer, by TrafficClass; a single one serves all classes.
using PeerLinks = std::vector<std::unique_ptr<Link>>;

class PeerListener {
 public:
  // Runs on a connected socket, the same on both sides. Throws Error.
  using Handshake = std::function<PeerLinks(Fd socket, int64_t deadline_ns)>;

  // `wake` is called from the listener's thread whenever links are ready. Throws Error.
  PeerListener(std::string address, SocketKind kind, Handshake handshake,
               std::function<void()> wake);
  ~PeerListener();

  const std::string& address() const noexcept { return address_; }
  // Links accepted since the last call. Any thread.
  std::vector<PeerLinks> take_accepted();
  // Connects to another listener of the same kind. Blocking; throws Error.
  PeerLinks connect(const std::string& address, int64_t deadline_ns) const;

 private:
  void serve();

  std::string address_;
  SocketKind kind_;
  Handshake handshake_;
  std::function<void()> wake_;
  Fd socket_;
  Fd stop_;
  std::mutex mutex_;
  std::vector<PeerLinks> accepted_;  // guarded by mutex_
  std::thread thread_;
};

// `self.regions` are what peers may reach; `local_regions` is our own region table, a superset.
std::unique_ptr<PeerListener> make_shm_listener(
    std::string address, ShmIdentity self, std::vector<std::shared_ptr<MemoryRegion>> local_regions,
    std::function<void()> wake);
std::unique_ptr<PeerListener> make_verbs_listener(std::string address,
                                                  std::shared_ptr<VerbsDomain> domain,
                                                  std::string name, uint64_t epoch,
                                                  std::function<void()> wake);

}  // namespace kvtransfer
