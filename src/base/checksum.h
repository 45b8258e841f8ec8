// XXH3-64: the checksum of headers and Layer Blocks. Runs at memory speed; not cryptographic: it
// guards against rot and mix-ups, not against an adversary who can write the store.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtransfer {

uint64_t checksum(const void* data, size_t bytes, uint64_t seed = 0) noexcept;

}  // namespace kvtransfer
