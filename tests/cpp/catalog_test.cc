#include "store/catalog.h"

#include <algorithm>
#include <map>
#include <set>

#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::make_chain;
using testing::make_key;

std::vector<BlockKey> keys_of(const std::vector<BlockId>& plan) {
  std::vector<BlockKey> keys;
  for (const BlockId& id : plan) keys.push_back(id.key);
  return keys;
}

class CatalogTest : public ::testing::Test {
 protected:
  std::vector<BlockId> add_chain(uint32_t length, uint64_t branch) {
    auto chain = make_chain(root_, length, branch);
    for (const BlockId& id : chain) catalog_.insert(id);
    return chain;
  }
  // What a scan of the directory does, in small steps.
  void scan(const std::vector<std::pair<BlockId, uint64_t>>& found) {
    catalog_.begin_scan();
    catalog_.reserve(found.size());
    for (size_t at = 0; at < found.size(); at += 3) {
      catalog_.merge(std::span(found).subspan(at, std::min<size_t>(3, found.size() - at)));
    }
    while (!catalog_.sweep(7)) {
    }
  }
  BlockKey root_ = make_key(1);
  Catalog catalog_{root_};
};

TEST_F(CatalogTest, KnowsWhatWasInsertedAndForgetsWhatWasErased) {
  const auto chain = add_chain(5, 0);
  EXPECT_EQ(catalog_.size(), 5u);
  for (const BlockId& id : chain) EXPECT_TRUE(catalog_.contains(id.key));
  EXPECT_FALSE(catalog_.contains(root_)) << "the root is no block";
  EXPECT_TRUE(catalog_.erase(chain[4].key));
  EXPECT_FALSE(catalog_.erase(chain[4].key));
  EXPECT_FALSE(catalog_.touch(chain[4].key));
  EXPECT_EQ(catalog_.size(), 4u);
}

TEST_F(CatalogTest, EvictsLeavesInTheOrderOfUseAndThenTheirParents) {
  const auto a = add_chain(3, 0), b = add_chain(3, 1);
  for (const BlockId& id : a) catalog_.touch(id.key);
  EXPECT_EQ(keys_of(catalog_.plan_eviction(2)),
            (std::vector<BlockKey>{b[2].key, b[1].key, b[0].key, a[2].key}));
  EXPECT_TRUE(catalog_.plan_eviction(6).empty());
  EXPECT_EQ(catalog_.plan_eviction(0).size(), 6u);
}

TEST_F(CatalogTest, ASharedPrefixStaysAsLongAsOneOfItsBranches) {
  const auto trunk = add_chain(2, 0);
  const BlockId left{make_key(50), trunk[1].key}, right{make_key(51), trunk[1].key};
  catalog_.insert(left);
  catalog_.insert(right);
  catalog_.touch(left.key);
  EXPECT_EQ(keys_of(catalog_.plan_eviction(3)), std::vector<BlockKey>{right.key});
  EXPECT_EQ(keys_of(catalog_.plan_eviction(1)),
            (std::vector<BlockKey>{right.key, left.key, trunk[1].key}));
}

TEST_F(CatalogTest, PinnedBlocksAndWhatTheyHangOnStay) {
  const auto chain = add_chain(4, 0);
  catalog_.pin(chain[2].key);
  EXPECT_EQ(keys_of(catalog_.plan_eviction(0)), std::vector<BlockKey>{chain[3].key});
  catalog_.unpin(chain[2].key);
  EXPECT_EQ(catalog_.plan_eviction(0).size(), 4u);
}

TEST_F(CatalogTest, OrphansGoFirstAndBecomeReachableWhenTheirParentComes) {
  const auto chain = make_chain(root_, 3, 0);
  catalog_.insert(chain[2]);
  catalog_.insert(chain[1]);
  const auto other = add_chain(1, 1);
  catalog_.touch(chain[2].key);
  EXPECT_EQ(keys_of(catalog_.plan_eviction(1)),
            (std::vector<BlockKey>{chain[2].key, chain[1].key}));
  catalog_.insert(chain[0]);
  catalog_.touch(chain[0].key);
  EXPECT_EQ(keys_of(catalog_.plan_eviction(3)), std::vector<BlockKey>{other[0].key});
}

TEST_F(CatalogTest, AScanReplacesWhatIsKnownButKeepsUseTimesAndPins) {
  const auto chain = add_chain(3, 0), gone = add_chain(2, 1);
  catalog_.pin(chain[2].key);
  const auto fresh = make_chain(root_, 2, 2);
  std::vector<std::pair<BlockId, uint64_t>> found;
  for (const BlockId& id : chain) found.emplace_back(id, 5);
  for (const BlockId& id : fresh) found.emplace_back(id, 7);
  scan(found);
  EXPECT_EQ(catalog_.size(), 5u);
  EXPECT_FALSE(catalog_.contains(gone[0].key));
  EXPECT_EQ(keys_of(catalog_.plan_eviction(0)), (std::vector<BlockKey>{fresh[1].key, fresh[0].key}))
      << "the chain hangs on its pinned leaf";
  catalog_.unpin(chain[2].key);
  EXPECT_EQ(keys_of(catalog_.plan_eviction(3)).front(), fresh[1].key) << "not used by us";
}

TEST_F(CatalogTest, BlocksThatComeOrGoDuringAScanAreNotUndoneByIt) {
  const auto old = add_chain(3, 0), meanwhile = make_chain(root_, 2, 1);
  catalog_.begin_scan();
  for (const BlockId& id : meanwhile) catalog_.insert(id);  // after their directory was read
  catalog_.erase(old[2].key);
  const std::vector<std::pair<BlockId, uint64_t>> found = {{old[0], 1}, {old[1], 1}};
  catalog_.merge(found);
  while (!catalog_.sweep(1)) {
  }
  for (const BlockId& id : meanwhile) EXPECT_TRUE(catalog_.contains(id.key));
  EXPECT_EQ(catalog_.size(), 4u);
  for (int round = 0; round < 300; ++round) scan({{old[0], 1}});  // the scan number wraps around
  EXPECT_EQ(catalog_.size(), 1u);
}

TEST_F(CatalogTest, ABlockThatNamesItselfAsItsParentIsNotBelieved) {
  const BlockId forged{make_key(9), make_key(9)};
  catalog_.insert(forged);
  scan({{forged, 3}});
  EXPECT_EQ(catalog_.size(), 0u);
  EXPECT_FALSE(catalog_.erase(forged.key));
}

// Against a map that is as plain as can be.
TEST_F(CatalogTest, RandomHistoriesAgreeWithAModel) {
  struct Known {
    BlockKey parent;
    uint64_t use;
    uint32_t pins;
  };
  std::map<BlockKey, Known> model;
  std::mt19937_64 random(12);
  std::vector<BlockId> universe;
  for (uint64_t i = 0; i < 300; ++i) {
    const BlockKey parent = i < 10 ? root_ : universe[random() % universe.size()].key;
    universe.push_back({make_key(5000 + i), parent});
  }
  uint64_t clock = 0;
  for (int step = 0; step < 30'000; ++step) {
    const BlockId& id = universe[random() % universe.size()];
    const auto it = model.find(id.key);
    switch (random() % 6) {
      case 0:
      case 1:
        catalog_.insert(id);
        if (it == model.end()) {
          model[id.key] = {id.parent, ++clock, 0};
        } else {
          it->second.use = ++clock;
        }
        break;
      case 2:
        EXPECT_EQ(catalog_.erase(id.key), it != model.end());
        if (it != model.end()) model.erase(it);
        break;
      case 3:
        EXPECT_EQ(catalog_.touch(id.key), it != model.end());
        if (it != model.end()) it->second.use = ++clock;
        break;
      case 4:
        catalog_.pin(id.key);
        if (it != model.end()) ++it->second.pins;
        break;
      default:
        catalog_.unpin(id.key);
        if (it != model.end() && it->second.pins > 0) --it->second.pins;
    }
    ASSERT_EQ(catalog_.size(), model.size());
    if (step % 500 != 0) continue;
    for (const BlockId& any : universe) {
      ASSERT_EQ(catalog_.contains(any.key), model.contains(any.key));
    }
    // The plan, replayed on the model: each is a leaf, unpinned, and the oldest of those there are.
    auto left = model;
    const uint64_t keep = random() % (model.size() + 1);
    const auto leaf_use = [&](const BlockKey& key, const Known& known) -> uint64_t {
      if (known.pins > 0) return UINT64_MAX;
      for (const auto& [_, other] : left) {
        if (other.parent == key) return UINT64_MAX;
      }
      BlockKey up = known.parent;
      while (up != root_ && left.contains(up)) up = left.at(up).parent;
      return up == root_ ? known.use : 0;
    };
    for (const BlockId& evicted : catalog_.plan_eviction(keep)) {
      ASSERT_TRUE(left.contains(evicted.key));
      ASSERT_EQ(left.at(evicted.key).parent, evicted.parent);
      uint64_t oldest = UINT64_MAX;
      for (const auto& [key, known] : left) oldest = std::min(oldest, leaf_use(key, known));
      ASSERT_EQ(leaf_use(evicted.key, left.at(evicted.key)), oldest);
      ASSERT_NE(oldest, UINT64_MAX);
      left.erase(evicted.key);
    }
    if (left.size() <= keep) continue;
    for (const auto& [key, known] : left) ASSERT_EQ(leaf_use(key, known), UINT64_MAX);
  }
}

TEST_F(CatalogTest, MemoryIsGivenBackByReuseAndABlockCostsAtMost150Bytes) {
  std::vector<std::pair<BlockId, uint64_t>> found;
  for (uint64_t branch = 0; branch < 200; ++branch) {
    for (const BlockId& id : make_chain(root_, 500, branch)) found.emplace_back(id, branch + 1);
  }
  scan(found);
  EXPECT_LE(catalog_.memory_bytes(), 150 * catalog_.size());
  const uint64_t before = catalog_.memory_bytes();
  for (int round = 0; round < 3; ++round) {
    for (const auto& [id, use] : found) catalog_.erase(id.key);
    EXPECT_EQ(catalog_.size(), 0u);
    for (const auto& [id, use] : found) catalog_.insert(id, use);
  }
  EXPECT_EQ(catalog_.size(), found.size());
  EXPECT_EQ(catalog_.memory_bytes(), before);
}

}  // namespace
}  // namespace kvtransfer
