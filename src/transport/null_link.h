// NullLink: accepts everything, moves nothing, completes what is signalled at once. What a WorkRing
// costs on it is the ring's own cost.
#pragma once

#include <memory>

#include "kvtransfer/link.h"

namespace kvtransfer {

std::unique_ptr<Link> make_null_link();

}  // namespace kvtransfer
