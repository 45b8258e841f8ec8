#include "kvtransfer/block_encoding.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "kvtransfer/traffic_manager.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using Kind = BlockEncoding::Kind;

// Independent of the code under test: by the definitions of the formats.
double value_of(Kind kind, uint16_t x) {
  const int exponent_bits = kind == Kind::kFp8OfBfloat16 ? 8 : 5;
  const int mantissa_bits = 15 - exponent_bits;
  const int exponent = x >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = x & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = x >> 15 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

double smallest(Kind kind) {
  return kind == Kind::kFp8OfBfloat16 ? std::ldexp(1, -133) : std::ldexp(1, -24);
}

std::vector<uint16_t> there_and_back(const BlockEncoding& encoding,
                                     const std::vector<uint16_t>& elements) {
  const uint64_t bytes = elements.size() * 2, stored = encoding.stored_bytes(bytes);
  // As in a slot: the encoded form lies in the tail of where the decoded one goes.
  std::vector<uint8_t> slot(bytes);
  encoding.encode(reinterpret_cast<const uint8_t*>(elements.data()), bytes,
                  slot.data() + bytes - stored);
  encoding.decode(slot.data() + bytes - stored, bytes, slot.data());
  std::vector<uint16_t> back(elements.size());
  std::memcpy(back.data(), slot.data(), bytes);
  return back;
}

class BlockEncodingTest : public ::testing::TestWithParam<Kind> {
 protected:
  void expect_close(const BlockEncoding& encoding, const std::vector<uint16_t>& elements) {
    const std::vector<uint16_t> back = there_and_back(encoding, elements);
    for (size_t first = 0; first < elements.size(); first += encoding.group) {
      double largest = 0;
      for (uint32_t i = 0; i < encoding.group; ++i) {
        const double x = std::abs(value_of(encoding.kind, elements[first + i]));
        if (std::isfinite(x)) largest = std::max(largest, x);
      }
      for (uint32_t i = 0; i < encoding.group; ++i) {
        const double x = value_of(encoding.kind, elements[first + i]);
        const double y = value_of(encoding.kind, back[first + i]);
        if (!std::isfinite(x)) {
          EXPECT_TRUE(std::isnan(y)) << x;
          continue;
        }
        const double bound =
            std::max({std::abs(x) / 16, largest * std::ldexp(1, -17), smallest(encoding.kind)});
        ASSERT_LE(std::abs(x - y), bound) << x << " became " << y << ", largest " << largest;
        EXPECT_TRUE(y == 0 || std::signbit(x) == std::signbit(y));
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Types, BlockEncodingTest,
                         ::testing::Values(Kind::kFp8OfBfloat16, Kind::kFp8OfFloat16),
                         [](const auto& info) {
                           return info.param == Kind::kFp8OfBfloat16 ? "bfloat16" : "float16";
                         });

TEST_P(BlockEncodingTest, EveryElementAloneIsWithinTheBound) {
  std::vector<uint16_t> elements;
  for (uint32_t x = 0; x < 65536; ++x) {
    elements.insert(elements.end(), 8, static_cast<uint16_t>(x));
  }
  expect_close({GetParam(), 8}, elements);
}

TEST_P(BlockEncodingTest, RandomBitsInGroupsAreWithinTheBound) {
  std::mt19937 random(7);
  for (const uint32_t group : {8u, 64u, 128u, 1024u}) {
    std::vector<uint16_t> elements(group * 200);
    for (uint16_t& element : elements) element = static_cast<uint16_t>(random());
    expect_close({GetParam(), group}, elements);
  }
}

TEST_P(BlockEncodingTest, CloseValuesShareAScaleAndZerosStay) {
  std::mt19937 random(8);
  const int mantissa_bits = GetParam() == Kind::kFp8OfBfloat16 ? 7 : 10;
  const int one = ((GetParam() == Kind::kFp8OfBfloat16 ? 127 : 15) << mantissa_bits);
  std::vector<uint16_t> elements(64 * 100);
  for (uint16_t& element : elements) {
    element = static_cast<uint16_t>(one + random() % (4u << mantissa_bits));
    if (random() % 4 == 0) element = 0;
    if (random() % 2 == 0) element |= 0x8000;
  }
  const auto back = there_and_back({GetParam(), 64}, elements);
  double squares = 0, errors = 0;
  for (size_t i = 0; i < elements.size(); ++i) {
    const double x = value_of(GetParam(), elements[i]), y = value_of(GetParam(), back[i]);
    if (x == 0) {
      EXPECT_EQ(y, 0);
    }
    squares += x * x;
    errors += (x - y) * (x - y);
  }
  EXPECT_LT(std::sqrt(errors / squares), 0.03);  // uniform mantissas: about 1/16 / sqrt(6)
}

TEST_P(BlockEncodingTest, AnEncodedBlockDecodesToItselfAgain) {
  std::mt19937 random(9);
  std::vector<uint16_t> elements(128 * 100);
  for (uint16_t& element : elements) element = static_cast<uint16_t>(random() & 0xbfff);
  const BlockEncoding encoding{GetParam(), 128};
  const auto once = there_and_back(encoding, elements);
  EXPECT_EQ(there_and_back(encoding, once), once);
}

TEST_P(BlockEncodingTest, AnyBytesDecodeToSomething) {
  const BlockEncoding encoding{GetParam(), 16};
  std::vector<uint8_t> stored(17 * 1000), out(2 * 16 * 1000);
  testing::fill_random(stored.data(), stored.size(), 3);
  encoding.decode(stored.data(), out.size(), out.data());
}

TEST(BlockEncodingCheck, SaysWhichPlaneDoesNotFit) {
  const BlockLayout layout(2, 16, {256, 192});
  EXPECT_NO_THROW((BlockEncoding{Kind::kFp8OfBfloat16, 32}).check(layout));
  EXPECT_NO_THROW(BlockEncoding{}.check(layout));
  try {
    BlockEncoding{Kind::kFp8OfBfloat16, 64}.check(layout);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layer 0 plane 1 has 192 bytes"), std::string::npos);
  }
  for (const uint32_t group : {0u, 4u, 12u, 2048u}) {
    EXPECT_THROW((BlockEncoding{Kind::kFp8OfFloat16, group}).check(layout), Error) << group;
  }
  EXPECT_THROW((BlockEncoding{Kind::kRaw, 8}).check(layout), Error);
}

// ---------------------------------------------------------------- in a store

class EncodedStoreTest : public ::testing::Test {
 protected:
  StoreOptions encoded() const {
    StoreOptions options;
    options.encoding = {Kind::kFp8OfBfloat16, 32};
    return options;
  }
  // Numbers that e4m3 holds exactly: what is wrong after a round trip is no rounding.
  void fill_exact(uint32_t slot, uint32_t seed) {
    std::mt19937 random(seed);
    auto* at = reinterpret_cast<uint16_t*>(pool_->region()->data() + pool_->payload_offset(slot));
    for (uint64_t i = 0; i < layout_.full_block_bytes() / 2; ++i) {
      const float x = static_cast<float>(random() % 15 + 1) * (random() % 2 ? 0.5F : -8.0F);
      at[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    }
  }

  const BlockLayout layout_{5, 16, {128, 64, 192}};
  testing::TemporaryDirectory directory_;
  const BlockKey root_ = testing::make_key(1);
  std::shared_ptr<BufferPool> pool_ = testing::make_pool(layout_, 24);
};

TEST_F(EncodedStoreTest, HalvesTheFilesAndGivesTheBlocksBack) {
  BlockStore store(directory_.path(), root_, layout_, encoded());
  EXPECT_EQ(store.slot_bytes(), 4096 + 5 * 16 * 384 + 2048u);
  EXPECT_EQ(store.file_bytes(), 4096u + (5 * 16 * 384 / 64 * 33 + 4095) / 4096 * 4096);
  const auto chain = testing::make_chain(root_, 12);
  const auto from = testing::acquire(*pool_, 12), to = testing::acquire(*pool_, 12);
  for (uint32_t i = 0; i < 12; ++i) fill_exact(from[i], i);
  ASSERT_EQ(store.put(chain, *pool_, from), 12u);
  EXPECT_EQ(std::filesystem::file_size(store.path_of(chain[0])), store.file_bytes());
  for (const bool verify : {true, false}) {
    StoreOptions options = encoded();
    options.verify_checksums = verify;
    BlockStore again(directory_.path(), root_, layout_, options);
    for (const uint32_t slot : to) {
      testing::fill_random(pool_->slot_data(slot), pool_->slot_bytes(), slot);
    }
    ASSERT_EQ(again.get(chain, *pool_, to), 12u);
    for (uint32_t i = 0; i < 12; ++i) {
      EXPECT_EQ(testing::payload_of(*pool_, to[i], layout_),
                testing::payload_of(*pool_, from[i], layout_));
    }
  }
}

// Padding differs from layout to layer count: the two forms of a block must never meet in a slot.
TEST_F(EncodedStoreTest, AnyLayoutComesBack) {
  std::mt19937 random(4);
  for (int round = 0; round < 60; ++round) {
    const uint32_t group = 8u << random() % 5;
    std::vector<uint32_t> planes(1 + random() % 3);
    for (uint32_t& plane : planes) plane = 2 * group * (1 + random() % 3);
    const BlockLayout layout(1 + random() % 7, 1 + random() % 40, planes);
    StoreOptions options;
    options.encoding = {Kind::kFp8OfBfloat16, group};
    const testing::TemporaryDirectory directory;
    BlockStore store(directory.path(), root_, layout, options);
    const auto pool = testing::make_pool(layout, 2);
    const auto slots = testing::acquire(*pool, 2);
    auto* from =
        reinterpret_cast<uint16_t*>(pool->region()->data() + pool->payload_offset(slots[0]));
    for (uint64_t i = 0; i < layout.full_block_bytes() / 2; ++i) {
      from[i] = static_cast<uint16_t>(0x3f80 + 16 * (random() % 8));  // 1, 1.125, ... 1.875
    }
    const auto chain = testing::make_chain(root_, 1);
    ASSERT_EQ(store.put(chain, *pool, {slots.data(), 1}), 1u);
    ASSERT_EQ(store.get(chain, *pool, {slots.data() + 1, 1}), 1u);
    ASSERT_EQ(testing::payload_of(*pool, slots[0], layout),
              testing::payload_of(*pool, slots[1], layout))
        << layout.to_string() << ", groups of " << group;
  }
}

TEST_F(EncodedStoreTest, LayersStreamInOrderAndThroughTheMemoryTier) {
  const auto store = std::make_shared<BlockStore>(directory_.path(), root_, layout_, encoded());
  const auto chain = testing::make_chain(root_, 12);
  const auto from = testing::acquire(*pool_, 12), to = testing::acquire(*pool_, 12);
  for (uint32_t i = 0; i < 12; ++i) fill_exact(from[i], i);
  TrafficOptions options;
  options.memory_blocks = 8;
  TrafficManager manager(store, pool_, nullptr, layout_, options);
  ASSERT_TRUE(manager.persist({chain, from})->wait(testing::in_seconds(20)));
  for (int round = 0; round < 4; ++round) {
    for (const uint32_t slot : to) memset(pool_->slot_data(slot), 0xee, pool_->slot_bytes());
    const auto stream = manager.make_stream(12);
    const auto ticket =
        manager.load({chain, to, layout_.num_layers(), stream, testing::in_seconds(20)});
    ASSERT_TRUE(ticket->wait(testing::in_seconds(20)));
    ASSERT_EQ(ticket->blocks(), 12u);
    for (uint32_t layer = 0; layer < 5; ++layer) EXPECT_TRUE(stream->ready(layer));
    for (uint32_t i = 0; i < 12; ++i) {
      EXPECT_EQ(testing::payload_of(*pool_, to[i], layout_),
                testing::payload_of(*pool_, from[i], layout_));
    }
  }
  EXPECT_GT(manager.memory_tier_stats().hits, 0u);
}

TEST_F(EncodedStoreTest, EveryFlippedByteIsAMiss) {
  BlockStore store(directory_.path(), root_, layout_, encoded());
  const auto chain = testing::make_chain(root_, 1);
  const auto slots = testing::acquire(*pool_, 1);
  fill_exact(slots[0], 1);
  ASSERT_EQ(store.put(chain, *pool_, slots), 1u);
  const std::string path = store.path_of(chain[0]);
  const uint64_t payload_end = 4096 + store.stored_offset(5);
  for (uint64_t at = 0; at < payload_end; at += at < 4096 ? 13 : 101) {
    BlockStore reader(directory_.path(), root_, layout_, [&] {
      StoreOptions options = encoded();
      options.remove_corrupt = false;
      return options;
    }());
    FILE* file = fopen(path.c_str(), "r+b");
    const auto flip = [&] {
      fseek(file, static_cast<long>(at), SEEK_SET);
      const int byte = fgetc(file);
      fseek(file, static_cast<long>(at), SEEK_SET);
      fputc(byte ^ 0x10, file);
      fflush(file);
    };
    flip();
    EXPECT_EQ(reader.get(chain, *pool_, slots), 0u) << at;
    flip();
    fclose(file);
    EXPECT_EQ(reader.get(chain, *pool_, slots), 1u) << at;
  }
}

TEST_F(EncodedStoreTest, ADirectoryHasOneEncodingWhichItRemembers) {
  { BlockStore store(directory_.path(), root_, layout_, encoded()); }
  EXPECT_THROW(BlockStore(directory_.path(), root_, layout_), Error);
  StoreOptions other = encoded();
  other.encoding.kind = Kind::kFp8OfFloat16;
  EXPECT_THROW(BlockStore(directory_.path(), root_, layout_, other), Error);
  const auto there = BlockStore::open_existing(directory_.path());
  EXPECT_EQ(there->options().encoding, encoded().encoding);
}

TEST_F(EncodedStoreTest, RefusesALayoutThatDoesNotDivide) {
  const BlockLayout odd(2, 16, {100});
  EXPECT_THROW(BlockStore(directory_.path(), root_, odd, encoded()), Error);
}

}  // namespace
}  // namespace kvtransfer
