#include "transport/verbs/handshake.h"

#include <errno.h>
#include <unistd.h>

#include "kvtransfer/error.h"
#include "transport/control_socket.h"
#include "transport/verbs/endpoint_blob.h"
#include "transport/verbs/verbs_link.h"

namespace kvtransfer {

namespace {

constexpr uint8_t kReady = 'R';

std::vector<uint8_t> receive_blob(const Fd& socket, int64_t deadline_ns) {
  std::vector<uint8_t> blob(kEndpointPrefixBytes);
  control_receive(socket, blob.data(), blob.size(), deadline_ns);
  blob.resize(endpoint_bytes(std::span<const uint8_t>(blob).first<kEndpointPrefixBytes>()));
  control_receive(socket, blob.data() + kEndpointPrefixBytes, blob.size() - kEndpointPrefixBytes,
                  deadline_ns);
  return blob;
}

}  // namespace

std::vector<std::unique_ptr<Link>> verbs_handshake(VerbsDomain& domain, const std::string& name,
                                                   uint64_t epoch, Fd socket, int64_t deadline_ns) {
  std::vector<std::unique_ptr<VerbsEndpoint>> endpoints;
  for (size_t i = 0; i < kNumTrafficClasses; ++i) {
    endpoints.push_back(domain.make_endpoint(static_cast<TrafficClass>(i), name, epoch));
    const std::vector<uint8_t> blob = endpoints.back()->blob();
    control_send(socket, blob.data(), blob.size(), deadline_ns);
  }
  std::vector<std::unique_ptr<Link>> links;
  links.reserve(endpoints.size());
  for (auto& endpoint : endpoints) {
    links.push_back(endpoint->connect(receive_blob(socket, deadline_ns)));
  }
  control_send(socket, &kReady, 1, deadline_ns);
  uint8_t answer = 0;
  control_receive(socket, &answer, 1, deadline_ns);
  if (answer != kReady)
    throw Error(ErrorCode::kMismatch, "verbs: the peer's answer is none of ours");
  for (auto& link : links) {
    Fd control(dup(socket.get()));
    if (!control.valid()) throw Error(ErrorCode::kIo, "verbs: control socket", errno);
    static_cast<VerbsLink&>(*link).watch(std::move(control));
  }
  return links;
}

}  // namespace kvtransfer
