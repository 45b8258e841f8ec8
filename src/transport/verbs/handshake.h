// Two engines become verbs peers over a stream socket: both send an endpoint blob per traffic
// class, connect to the other's, and say so; only then may either post.
#pragma once

#include <string>

#include "base/fd.h"
#include "kvtransfer/verbs.h"

namespace kvtransfer {

// By TrafficClass. Throws Error.
std::vector<std::unique_ptr<Link>> verbs_handshake(VerbsDomain& domain, const std::string& name,
                                                   uint64_t epoch, Fd socket, int64_t deadline_ns);

}  // namespace kvtransfer
