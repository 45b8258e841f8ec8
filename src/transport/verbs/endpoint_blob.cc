#include "transport/verbs/endpoint_blob.h"

#include <string.h>

#include <algorithm>
#include <bit>

#include "base/checksum.h"
#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

static_assert(std::endian::native == std::endian::little,
              "the blob is written as it lies in memory");

constexpr char kMagic[8] = {'K', 'V', 'T', 'V', 'E', 'R', 'B', 'S'};
constexpr size_t kChecksumAt = kEndpointPrefixBytes;
constexpr size_t kBodyAt = kChecksumAt + 8;
constexpr size_t kNameBytes = 64;
constexpr size_t kFixedBytes = kBodyAt + 8 + 16 + 2 + 1 + 1 + 1 + 1 + 2 + kNameBytes;
constexpr size_t kQueuePairBytes = 8;
constexpr size_t kRegionBytes = 24;
static_assert(kFixedBytes + kMaxQueuePairs * kQueuePairBytes + kMaxVerbsRegions * kRegionBytes <=
              VerbsEndpoint::kMaxBlobBytes);

// Writes at `to` and moves it on. REQUIRES: the room is there.
void put_bytes(uint8_t*& to, const void* from, size_t bytes) {
  memcpy(to, from, bytes);
  to += bytes;
}
template <typename T>
void put(uint8_t*& to, T value) {
  put_bytes(to, &value, sizeof value);
}

// REQUIRES: sizeof(T) bytes are there.
template <typename T>
T take(std::span<const uint8_t>& from) {
  T value;
  memcpy(&value, from.data(), sizeof value);
  from = from.subspan(sizeof value);
  return value;
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::kMismatch, "verbs: the peer's endpoint " + why);
}

}  // namespace

std::vector<uint8_t> pack_endpoint(const EndpointInfo& info) {
  if (info.queue_pairs.empty() || info.queue_pairs.size() > kMaxQueuePairs ||
      info.regions.size() > kMaxVerbsRegions || info.name.size() >= kNameBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                "verbs: an endpoint has 1 to 16 queue pairs, up to 64 regions and a name of less "
                "than 64 bytes");
  }
  std::vector<uint8_t> out(kFixedBytes + info.queue_pairs.size() * kQueuePairBytes +
                           info.regions.size() * kRegionBytes);
  uint8_t* to = out.data();
  put_bytes(to, kMagic, sizeof kMagic);
  put(to, kEndpointVersion);
  put(to, static_cast<uint32_t>(out.size()));
  put(to, uint64_t{0});  // the checksum, below
  put(to, info.epoch);
  put_bytes(to, info.gid, sizeof info.gid);
  put(to, info.lid);
  put(to, static_cast<uint8_t>(info.traffic_class));
  put(to, info.mtu);
  put(to, info.rd_atomic);
  put(to, static_cast<uint8_t>(info.queue_pairs.size()));
  put(to, static_cast<uint16_t>(info.regions.size()));
  std::copy(info.name.begin(), info.name.end(), to);  // zeros follow
  to += kNameBytes;
  for (const EndpointQueuePair& qp : info.queue_pairs) {
    put(to, qp.number);
    put(to, qp.psn);
  }
  for (const VerbsRegion& region : info.regions) {
    put(to, region.address);
    put(to, region.bytes);
    put(to, region.remote_key);
    put(to, uint32_t{0});
  }
  const uint64_t sum = checksum(out.data() + kBodyAt, out.size() - kBodyAt);
  memcpy(out.data() + kChecksumAt, &sum, sizeof sum);
  return out;
}

size_t endpoint_bytes(std::span<const uint8_t, kEndpointPrefixBytes> prefix) {
  std::span<const uint8_t> rest = prefix;
  if (memcmp(rest.data(), kMagic, sizeof kMagic) != 0) refuse("is none of ours");
  rest = rest.subspan(sizeof kMagic);
  const auto version = take<uint32_t>(rest);
  if (version != kEndpointVersion) {
    refuse("has version " + std::to_string(version) + ", ours is " +
           std::to_string(kEndpointVersion));
  }
  const auto bytes = take<uint32_t>(rest);
  if (bytes < kFixedBytes || bytes > VerbsEndpoint::kMaxBlobBytes) {
    refuse("claims " + std::to_string(bytes) + " bytes");
  }
  return bytes;
}

EndpointInfo parse_endpoint(std::span<const uint8_t> blob) {
  if (blob.size() < kFixedBytes) refuse("is cut off at " + std::to_string(blob.size()) + " bytes");
  if (endpoint_bytes(blob.first<kEndpointPrefixBytes>()) != blob.size()) {
    refuse("has " + std::to_string(blob.size()) + " bytes and claims another number");
  }
  std::span<const uint8_t> rest = blob.subspan(kChecksumAt);
  if (take<uint64_t>(rest) != checksum(blob.data() + kBodyAt, blob.size() - kBodyAt)) {
    refuse("fails its checksum");
  }
  EndpointInfo info;
  info.epoch = take<uint64_t>(rest);
  std::copy_n(rest.begin(), sizeof info.gid, info.gid);
  rest = rest.subspan(sizeof info.gid);
  info.lid = take<uint16_t>(rest);
  const auto traffic_class = take<uint8_t>(rest);
  info.mtu = take<uint8_t>(rest);
  info.rd_atomic = take<uint8_t>(rest);
  const auto num_qps = take<uint8_t>(rest);
  const auto num_regions = take<uint16_t>(rest);
  const auto* name = reinterpret_cast<const char*>(rest.data());
  info.name.assign(name, strnlen(name, kNameBytes - 1));
  rest = rest.subspan(kNameBytes);
  if (traffic_class >= kNumTrafficClasses || info.mtu < 1 || info.mtu > 5 || num_qps == 0 ||
      num_qps > kMaxQueuePairs || num_regions > kMaxVerbsRegions ||
      rest.size() != num_qps * kQueuePairBytes + num_regions * kRegionBytes) {
    refuse("has fields out of range");
  }
  info.traffic_class = static_cast<TrafficClass>(traffic_class);
  for (size_t i = 0; i < num_qps; ++i) {
    const auto number = take<uint32_t>(rest);
    info.queue_pairs.push_back({number & 0xffffff, take<uint32_t>(rest) & 0xffffff});
  }
  for (size_t i = 0; i < num_regions; ++i) {
    VerbsRegion region{};
    region.address = take<uint64_t>(rest);
    region.bytes = take<uint64_t>(rest);
    region.remote_key = take<uint32_t>(rest);
    take<uint32_t>(rest);
    info.regions.push_back(region);
  }
  return info;
}

}  // namespace kvtransfer
