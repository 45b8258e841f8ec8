// What a peer must know of an endpoint to connect to it. Little-endian, whatever carries it:
//
//   | magic "KVTVERBS" | version u32 | bytes u32 | checksum u64 (XXH3 of what follows) |
//   | epoch u64 | gid 16 | lid u16 | traffic class u8 | mtu u8 | rd_atomic u8 | num_qps u8 |
//   | num_regions u16 | name 64 | num_qps x { number u32, psn u32 }
//   | num_regions x { address u64, bytes u64, remote key u32, 0 u32 } |
//
// It comes from another process: parse_endpoint() believes nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvtransfer/link.h"
#include "kvtransfer/verbs.h"

namespace kvtransfer {

constexpr uint32_t kEndpointVersion = 1;
constexpr size_t kMaxQueuePairs = 16;
constexpr size_t kMaxVerbsRegions = 64;

struct EndpointQueuePair {
  uint32_t number;
  uint32_t psn;  // 24 bits
};

struct EndpointInfo {
  std::string name;  // at most 63 bytes
  uint64_t epoch = 0;
  uint8_t gid[16] = {};
  uint16_t lid = 0;
  TrafficClass traffic_class = TrafficClass::kKv;
  uint8_t mtu = 0;        // ibv_mtu
  uint8_t rd_atomic = 0;  // reads it will answer at a time
  std::vector<EndpointQueuePair> queue_pairs;
  std::vector<VerbsRegion> regions;  // local keys stay at home
};

std::vector<uint8_t> pack_endpoint(const EndpointInfo& info);
// Throws Error(kMismatch) saying what is wrong with it.
EndpointInfo parse_endpoint(std::span<const uint8_t> blob);

// The part of a blob that tells its length, for reading it from a stream.
constexpr size_t kEndpointPrefixBytes = 16;
// Throws Error(kMismatch) unless it begins an endpoint blob of our version and of a sane length.
size_t endpoint_bytes(std::span<const uint8_t, kEndpointPrefixBytes> prefix);

}  // namespace kvtransfer
