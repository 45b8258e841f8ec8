// The header page, byte by byte as docs/block_format.md draws it, and hostile ones.
#include "store/block_file.h"

#include <cstring>

#include "base/checksum.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::make_key;

class BlockFileTest : public ::testing::Test {
 protected:
  BlockFileTest() : slot_(store_.file_bytes()) {
    testing::fill_random(slot_.data(), slot_.size(), 1);
    write_header(slot_.data(), store_, id_, 16);
  }
  template <class T>
  T field(size_t offset) const {
    T value;
    std::memcpy(&value, slot_.data() + offset, sizeof value);
    return value;
  }
  template <class T>
  void set(size_t offset, T value) {
    std::memcpy(slot_.data() + offset, &value, sizeof value);
  }
  // Makes the header checksum right again after a deliberate change: what an adversary would do.
  void seal() {
    constexpr size_t kAt = offsetof(BlockHeader, header_checksum);
    const uint64_t head = checksum(slot_.data(), kAt);
    set(kAt, checksum(slot_.data() + kAt + 8, store_.header_bytes() - kAt - 8, head));
  }
  bool good_layer(uint32_t layer) const {
    const uint8_t* stored = slot_.data() + store_.header_bytes() + store_.stored_offset(layer);
    return check_layer(slot_.data(), stored, store_, layer);
  }
  std::string verdict() const { return check_header(slot_.data(), store_, id_); }

  testing::TemporaryDirectory directory_;
  BlockLayout layout_{5, 16, {48, 16}};
  BlockStore store_{directory_.path() + "/s", make_key(9), layout_};
  BlockId id_{make_key(1), make_key(2)};
  std::vector<uint8_t> slot_;
};

TEST_F(BlockFileTest, FieldsLieWhereTheDocumentDrawsThem) {
  EXPECT_EQ(std::string(slot_.begin(), slot_.begin() + 8), "KVTBLOCK");
  EXPECT_EQ(field<uint32_t>(8), 2u);
  EXPECT_EQ(field<uint32_t>(12), 4096u);
  EXPECT_EQ(std::memcmp(slot_.data() + 16, make_key(9).data(), 32), 0);
  EXPECT_EQ(std::memcmp(slot_.data() + 48, id_.key.data(), 32), 0);
  EXPECT_EQ(std::memcmp(slot_.data() + 80, id_.parent.data(), 32), 0);
  EXPECT_EQ(field<uint64_t>(112), layout_.digest());
  EXPECT_EQ(field<uint64_t>(120), layout_.full_block_bytes());
  EXPECT_EQ(field<uint32_t>(128), 5u);
  EXPECT_EQ(field<uint32_t>(132), 16u);
  EXPECT_EQ(field<uint32_t>(136), 16u);
  EXPECT_EQ(field<uint32_t>(140), 0u);
  for (uint32_t layer = 0; layer < 5; ++layer) {
    EXPECT_EQ(field<uint64_t>(152 + 8 * layer),
              checksum(slot_.data() + 4096 + layout_.layer_offset(layer),
                       layout_.layer_bytes(layer), layer + 1));
  }
}

TEST_F(BlockFileTest, UnusedHeaderBytesAndThePaddingAreZero) {
  for (size_t i = 152 + 5 * 8; i < 4096; ++i) ASSERT_EQ(slot_[i], 0) << i;
  for (size_t i = 4096 + layout_.full_block_bytes(); i < slot_.size(); ++i) {
    ASSERT_EQ(slot_[i], 0) << i;
  }
}

TEST_F(BlockFileTest, AFreshHeaderIsAcceptedForItsOwnBlockOnly) {
  EXPECT_EQ(verdict(), "");
  EXPECT_EQ(check_header(slot_.data(), store_, {make_key(7), id_.parent}), "other block's key");
  EXPECT_EQ(check_header(slot_.data(), store_, {id_.key, make_key(7)}), "other parent");
  const BlockStore other(directory_.path() + "/t", make_key(10), layout_);
  EXPECT_EQ(check_header(slot_.data(), other, id_), "other namespace");
}

TEST_F(BlockFileTest, EachFieldHasItsOwnReasonWhenSealedWithAWrongValue) {
  const auto with = [&](auto offset, auto value) {
    const std::vector<uint8_t> before = slot_;
    set(offset, value);
    seal();
    const std::string text = verdict();
    slot_ = before;
    return text;
  };
  EXPECT_EQ(with(0, uint8_t{'X'}), "not a block file");
  EXPECT_NE(with(8, uint32_t{1}).find("format version 1"), std::string::npos);
  EXPECT_EQ(with(8, uint32_t{0x01000000}).find("format version"), 0u) << "other endianness";
  EXPECT_EQ(with(12, uint32_t{8192}), "wrong header size");
  EXPECT_EQ(with(12, UINT32_MAX), "wrong header size");
  EXPECT_EQ(with(112, uint64_t{1}), "other layout");
  EXPECT_EQ(with(120, UINT64_MAX), "other layout");
  EXPECT_EQ(with(128, UINT32_MAX), "other layout");
  EXPECT_EQ(with(132, uint32_t{0}), "other layout");
  EXPECT_EQ(with(136, uint32_t{0}), "impossible token count");
  EXPECT_EQ(with(136, uint32_t{17}), "impossible token count");
  EXPECT_EQ(with(136, uint32_t{16}), "");
}

TEST_F(BlockFileTest, AnyFlippedBitOfAHeaderPageIsSeen) {
  for (size_t bit = 0; bit < 8 * 4096; ++bit) {
    slot_[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    ASSERT_NE(verdict(), "") << "bit " << bit;
    slot_[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  EXPECT_EQ(verdict(), "");
}

TEST_F(BlockFileTest, ALayerVerifiesOnlyInItsOwnPlace) {
  for (uint32_t layer = 0; layer < 5; ++layer) EXPECT_TRUE(good_layer(layer));
  uint8_t* a = slot_.data() + 4096 + layout_.layer_offset(1);
  uint8_t* b = slot_.data() + 4096 + layout_.layer_offset(3);
  std::swap_ranges(a, a + layout_.layer_bytes(1), b);
  EXPECT_FALSE(good_layer(1));
  EXPECT_FALSE(good_layer(3));
  EXPECT_TRUE(good_layer(2));
  // Even with the checksums swapped along: the layer's index is in them.
  const auto first = field<uint64_t>(152 + 8), second = field<uint64_t>(152 + 24);
  set(152 + 8, second);
  set(152 + 24, first);
  EXPECT_FALSE(good_layer(1));
}

TEST_F(BlockFileTest, EqualLayersHaveDifferentChecksums) {
  std::fill(slot_.begin() + 4096, slot_.end(), 0);
  write_header(slot_.data(), store_, id_, 16);
  EXPECT_NE(field<uint64_t>(152), field<uint64_t>(160));
}

// Exactly one page of allocated memory: AddressSanitizer tells of a read beyond it.
TEST_F(BlockFileTest, HostileHeadersAreRefusedWithoutReadingBeyondThePage) {
  const auto page = std::make_unique<uint8_t[]>(store_.header_bytes());
  std::mt19937_64 random(5);
  for (int round = 0; round < 3000; ++round) {
    std::memcpy(page.get(), slot_.data(), store_.header_bytes());
    for (uint32_t edits = 1 + random() % 6; edits > 0; --edits) {
      const uint64_t value = random() % 4 == 0 ? ~uint64_t{0} : random();
      std::memcpy(page.get() + random() % (store_.header_bytes() - 8), &value, 8);
    }
    EXPECT_NE(check_header(page.get(), store_, id_), "");
  }
}

TEST(BlockFile, HeaderPagesGrowWithTheLayers) {
  EXPECT_EQ(header_pages_bytes(1), 4096u);
  EXPECT_EQ(header_pages_bytes((4096 - 152) / 8), 4096u);
  EXPECT_EQ(header_pages_bytes((4096 - 152) / 8 + 1), 8192u);
  EXPECT_EQ(header_pages_bytes(BlockLayout::kMaxLayers), 12288u);
}

TEST(BlockFile, AStoreWithManyLayersWorksThroughItsLargerHeader) {
  const testing::TemporaryDirectory directory;
  const BlockLayout layout(900, 4, {16});
  BlockStore store(directory.path() + "/s", make_key(1), layout);
  const auto pool = testing::make_pool(layout, 4);
  const auto chain = testing::make_chain(make_key(1), 2);
  const auto slots = testing::acquire(*pool, 2), into = testing::acquire(*pool, 2);
  for (uint32_t i = 0; i < 2; ++i) {
    testing::fill_random(pool->region()->data() + pool->payload_offset(slots[i]),
                         layout.full_block_bytes(), i);
  }
  ASSERT_EQ(store.put(chain, *pool, slots), 2u);
  ASSERT_EQ(store.get(chain, *pool, into), 2u);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(testing::payload_of(*pool, into[i], layout),
              testing::payload_of(*pool, slots[i], layout));
  }
}

TEST(BlockFile, HexIsLowerCaseAndTwoDigitsAByte) {
  const uint8_t bytes[] = {0x00, 0x0F, 0xA5, 0xFF};
  EXPECT_EQ(to_hex(bytes), "000fa5ff");
}

}  // namespace
}  // namespace kvtransfer
