#include "transport/verbs/endpoint_blob.h"

#include <cstring>

#include "base/checksum.h"
#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

EndpointInfo sample(size_t queue_pairs = 3, size_t regions = 2) {
  EndpointInfo info;
  info.name = "decode-7";
  info.epoch = 0x1122334455667788;
  for (uint8_t i = 0; i < 16; ++i) info.gid[i] = i;
  info.lid = 0x1234;
  info.traffic_class = TrafficClass::kModel;
  info.mtu = 5;
  info.rd_atomic = 16;
  for (uint32_t i = 0; i < queue_pairs; ++i) info.queue_pairs.push_back({100 + i, 7000 + i});
  for (uint32_t i = 0; i < regions; ++i) info.regions.push_back({0x7f00 + i, 1u << 20, 0, 9 + i});
  return info;
}

std::string refusal_of(std::span<const uint8_t> blob) {
  try {
    parse_endpoint(blob);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    return error.what();
  }
  return "";
}

// Makes the checksum right again, so that the fields behind it are what is looked at.
void seal(std::vector<uint8_t>& blob) {
  const auto bytes = static_cast<uint32_t>(blob.size());
  std::memcpy(blob.data() + 12, &bytes, sizeof bytes);
  const uint64_t sum = checksum(blob.data() + 24, blob.size() - 24);
  std::memcpy(blob.data() + 16, &sum, sizeof sum);
}

TEST(EndpointBlob, ComesBackAsItWasPacked) {
  for (size_t qps : {1, 3, 16}) {
    for (size_t regions : {0, 2, 64}) {
      const EndpointInfo info = sample(qps, regions);
      const auto blob = pack_endpoint(info);
      EXPECT_LE(blob.size(), VerbsEndpoint::kMaxBlobBytes);
      EXPECT_EQ(endpoint_bytes(std::span<const uint8_t>(blob).first<kEndpointPrefixBytes>()),
                blob.size());
      const EndpointInfo back = parse_endpoint(blob);
      EXPECT_EQ(back.name, info.name);
      EXPECT_EQ(back.epoch, info.epoch);
      EXPECT_EQ(std::memcmp(back.gid, info.gid, 16), 0);
      EXPECT_EQ(back.lid, info.lid);
      EXPECT_EQ(back.traffic_class, info.traffic_class);
      EXPECT_EQ(back.mtu, info.mtu);
      EXPECT_EQ(back.rd_atomic, info.rd_atomic);
      ASSERT_EQ(back.queue_pairs.size(), qps);
      EXPECT_EQ(back.queue_pairs.back().number, info.queue_pairs.back().number);
      EXPECT_EQ(back.queue_pairs.back().psn, info.queue_pairs.back().psn);
      ASSERT_EQ(back.regions.size(), regions);
      if (regions > 0) {
        EXPECT_EQ(back.regions.back().address, info.regions.back().address);
        EXPECT_EQ(back.regions.back().remote_key, info.regions.back().remote_key);
        EXPECT_EQ(back.regions.back().local_key, 0u);
      }
    }
  }
}

TEST(EndpointBlob, EveryFlippedBitIsRefused) {
  const auto good = pack_endpoint(sample());
  for (size_t byte = 0; byte < good.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      auto blob = good;
      blob[byte] ^= static_cast<uint8_t>(1 << bit);
      EXPECT_NE(refusal_of(blob), "") << "byte " << byte << " bit " << bit;
    }
  }
}

TEST(EndpointBlob, EveryOtherLengthIsRefused) {
  const auto good = pack_endpoint(sample());
  for (size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(refusal_of(std::span(good).first(length)), "") << length;
  }
  auto longer = good;
  longer.push_back(0);
  EXPECT_NE(refusal_of(longer), "");
}

TEST(EndpointBlob, FieldsOutOfRangeAreRefusedEvenWithARightChecksum) {
  constexpr size_t kClass = 50, kMtu = 51, kQueuePairs = 53, kRegions = 54;
  const auto refused = [](size_t at, uint8_t value) {
    auto blob = pack_endpoint(sample());
    blob[at] = value;
    seal(blob);
    return refusal_of(blob).find("out of range") != std::string::npos;
  };
  EXPECT_TRUE(refused(kClass, 2));
  EXPECT_TRUE(refused(kMtu, 0));
  EXPECT_TRUE(refused(kMtu, 6));
  EXPECT_TRUE(refused(kQueuePairs, 0));
  EXPECT_TRUE(refused(kQueuePairs, 200));
  EXPECT_TRUE(refused(kRegions, 255));
}

TEST(EndpointBlob, RandomBytesNeverPassNorCrash) {
  std::mt19937_64 random(8);
  for (int round = 0; round < 20'000; ++round) {
    auto blob = pack_endpoint(sample(1 + random() % 16, random() % 65));
    const size_t damage = 1 + random() % 8;
    for (size_t i = 0; i < damage; ++i) blob[24 + random() % (blob.size() - 24)] = random() & 0xff;
    blob.resize(random() % 3 == 0 ? random() % (blob.size() + 1) : blob.size());
    if (blob.size() >= 24) seal(blob);
    try {
      const EndpointInfo info = parse_endpoint(blob);
      EXPECT_LE(info.queue_pairs.size(), kMaxQueuePairs);
      EXPECT_LE(info.regions.size(), kMaxVerbsRegions);
      EXPECT_LT(info.name.size(), 64u);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    }
  }
}

TEST(EndpointBlob, AnotherVersionIsNamed) {
  auto blob = pack_endpoint(sample());
  blob[8] = 9;
  seal(blob);
  EXPECT_NE(refusal_of(blob).find("version 9"), std::string::npos);
}

TEST(EndpointBlob, WhatDoesNotFitIsRefusedWhenPacking) {
  EXPECT_THROW(pack_endpoint(sample(0)), Error);
  EXPECT_THROW(pack_endpoint(sample(17)), Error);
  EXPECT_THROW(pack_endpoint(sample(1, 65)), Error);
  EndpointInfo info = sample();
  info.name = std::string(64, 'x');
  EXPECT_THROW(pack_endpoint(info), Error);
}

}  // namespace
}  // namespace kvtransfer
