// ShmLink: the same-host twin of an RDMA queue pair. The peer's regions are mapped; post() copies
// (non-temporal stores for block-sized pieces), then publishes immediates through the peer's
// mailbox.
#pragma once

#include <memory>

#include "kvtransfer/link.h"
#include "transport/shm_wire.h"

namespace kvtransfer {

std::unique_ptr<Link> make_shm_link(ShmPeer peer,
                                    std::vector<std::shared_ptr<MemoryRegion>> local_regions);

}  // namespace kvtransfer
