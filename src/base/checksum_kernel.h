// The body of checksum(), compiled once per instruction set (checksum*.cc): XXH3 picks its vector
// code at compile time, and a wheel is built for the oldest processor.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/checksum.h"

namespace kvtransfer {

using ChecksumKernel = uint64_t (*)(const void* data, size_t bytes, uint64_t seed) noexcept;

uint64_t checksum_avx2(const void* data, size_t bytes, uint64_t seed) noexcept;
uint64_t checksum_avx512(const void* data, size_t bytes, uint64_t seed) noexcept;

namespace {

constexpr size_t kLanes = 4;
using Lanes = XXH3_state_t[kLanes];

// `lanes` may hold anything.
inline uint64_t hash_lanes(Lanes& lanes, const void* data, size_t bytes, uint64_t seed) noexcept {
  constexpr size_t kPiece = 512;
  const auto* begin = static_cast<const uint8_t*>(data);
  const size_t quarter = bytes / kLanes / 64 * 64;
  for (XXH3_state_t& lane : lanes) {
    // reset_withSeed() makes the seed's secret only if the state doesn't claim to have it.
    XXH3_INITSTATE(&lane);
    XXH3_64bits_reset_withSeed(&lane, seed);
  }
  size_t at = 0;
  for (; at + kPiece <= quarter; at += kPiece) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      XXH3_64bits_update(&lanes[lane], begin + lane * quarter + at, kPiece);
    }
  }
  uint64_t digests[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const size_t end = lane + 1 == kLanes ? bytes - lane * quarter : quarter;
    XXH3_64bits_update(&lanes[lane], begin + lane * quarter + at, end - at);
    digests[lane] = XXH3_64bits_digest(&lanes[lane]);
  }
  return XXH3_64bits_withSeed(digests, sizeof digests, seed);
}

inline uint64_t checksum_kernel(const void* data, size_t bytes, uint64_t seed) noexcept {
  if (bytes < kLaneBytes) return XXH3_64bits_withSeed(data, bytes, seed);
  Lanes lanes;
  return hash_lanes(lanes, data, bytes, seed);
}

}  // namespace

}  // namespace kvtransfer
