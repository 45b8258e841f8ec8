// checksum(): the checksum of headers and Layer Blocks, made of XXH3-64. Runs at memory speed; not
// cryptographic: it guards against rot and mix-ups, not against an adversary who can write the
// store.
//
// From kLaneBytes on, the data is four lanes (three quarters rounded down to 64 bytes, and the
// rest), hashed side by side, and the checksum is the XXH3-64 of the four hashes. One stream is
// bound by the latency of memory, four come close to its bandwidth: 10 and 15 GB/s on a 2.x GHz
// Sapphire Rapids core (bench/bench_checksum.cc).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtransfer {

constexpr size_t kLaneBytes = 32768;

uint64_t checksum(const void* data, size_t bytes, uint64_t seed = 0) noexcept;

// What the processor lets it use: "avx512", "avx2" or "baseline"; the result is the same.
const char* checksum_backend() noexcept;

}  // namespace kvtransfer
