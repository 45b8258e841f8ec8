#include "store/directory_scan.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <thread>

#include "test_support.h"

namespace kvtransfer {
namespace {

namespace fs = std::filesystem;
using testing::make_key;

constexpr uint64_t kFileBytes = 4096;

class DirectoryScanTest : public ::testing::Test {
 protected:
  std::string root() const { return directory_.path(); }
  // A file of `bytes` at `relative`, last changed `age_s` ago.
  void put(const std::string& relative, uint64_t bytes = kFileBytes, int64_t age_s = 0) {
    const std::string path = root() + "/" + relative;
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path).close();
    fs::resize_file(path, bytes);
    const timeval times[2] = {{time(nullptr) - age_s, 0}, {time(nullptr) - age_s, 0}};
    ASSERT_EQ(utimes(path.c_str(), times), 0);
  }
  static BlockId id(uint64_t seed) { return {make_key(seed), make_key(seed + 1000)}; }
  static std::string place(const BlockId& id) {
    const std::string name = block_name(id);
    return name.substr(0, 2) + "/" + name.substr(2, 2) + "/" + name;
  }
  DirectoryScan scan(ScanDetail detail = ScanDetail::kFiles) const {
    return scan_directory(root(), kFileBytes, 300, detail);
  }

  testing::TemporaryDirectory directory_;
};

TEST(BlockNames, ComeBackAsTheIdTheyWereMadeOf) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const BlockId id{make_key(seed), make_key(seed * 7 + 1)};
    const auto back = id_from_name(block_name(id));
    ASSERT_TRUE(back.has_value());
    EXPECT_EQ(back->key, id.key);
    EXPECT_EQ(back->parent, id.parent);
  }
}

TEST(BlockNames, AnythingElseIsNoBlock) {
  const std::string good = block_name({make_key(1), make_key(2)});
  ASSERT_TRUE(id_from_name(good));
  EXPECT_FALSE(id_from_name(""));
  EXPECT_FALSE(id_from_name(good.substr(1)));
  EXPECT_FALSE(id_from_name(good + "x"));
  for (size_t at = 0; at < good.size(); ++at) {
    for (const char wrong : {'g', 'A', ' ', '/', '\0', '\xff'}) {
      std::string name = good;
      name[at] = wrong;
      EXPECT_FALSE(id_from_name(name)) << at;
    }
  }
}

TEST_F(DirectoryScanTest, FindsEveryBlockOfTheRightSizeOnce) {
  std::set<BlockKey> wanted;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    put(place(id(seed)));
    wanted.insert(id(seed).key);
  }
  put(place(id(9000)), kFileBytes - 1);
  put(place(id(9001)), 0);
  const DirectoryScan found = scan();
  std::set<BlockKey> seen;
  for (const auto& [block, file_time] : found.blocks) {
    EXPECT_TRUE(seen.insert(block.key).second) << "twice";
    EXPECT_GT(file_time, uint64_t{1} << 60);
  }
  EXPECT_EQ(seen, wanted);
}

TEST_F(DirectoryScanTest, FileTimesAreTheFiles) {
  put(place(id(1)), kFileBytes, 1000);
  put(place(id(2)), kFileBytes, 10);
  const auto blocks = scan().blocks;
  ASSERT_EQ(blocks.size(), 2u);
  const bool first_is_old = blocks[0].first.key == id(1).key;
  const uint64_t older = blocks[first_is_old ? 0 : 1].second;
  const uint64_t newer = blocks[first_is_old ? 1 : 0].second;
  EXPECT_EQ(newer - older, 990'000'000'000u);
}

TEST_F(DirectoryScanTest, StaleTemporariesGoAndYoungOnesStay) {
  put("ab/cd/.tmp-1-2-3", 100, 400);
  put("ab/cd/.tmp-1-2-4", kFileBytes, 400);
  put("ab/cd/.tmp-9-9-9", 100, 10);
  put(".tmp-manifest-77", 10, 400);
  const DirectoryScan found = scan();
  EXPECT_EQ(found.swept_temporaries, 3u);
  EXPECT_TRUE(found.blocks.empty());
  EXPECT_TRUE(fs::exists(root() + "/ab/cd/.tmp-9-9-9"));
  EXPECT_FALSE(fs::exists(root() + "/ab/cd/.tmp-1-2-3"));
}

TEST_F(DirectoryScanTest, NamesAloneSayNothingOfSizesAndTimes) {
  put(place(id(1)));
  put(place(id(2)), 17, 4000);
  put("ab/cd/.tmp-1-2-3", 100, 400);
  fs::create_directories(root() + "/ab/cd/" + block_name(id(5)));
  fs::create_symlink("/etc/passwd", root() + "/ab/cd/" + block_name(id(6)));
  const DirectoryScan found = scan(ScanDetail::kNames);
  std::set<BlockKey> seen;
  for (const auto& [block, file_time] : found.blocks) {
    seen.insert(block.key);
    EXPECT_EQ(file_time, 0u);
  }
  EXPECT_EQ(seen, (std::set<BlockKey>{id(1).key, id(2).key}));
  EXPECT_EQ(found.swept_temporaries, 1u);
  EXPECT_TRUE(fs::exists(root() + "/" + place(id(2))));
}

TEST_F(DirectoryScanTest, StrangeThingsAreLeftAlone) {
  put("KVTRANSFER", 100, 4000);
  put("evict.lock", 0, 4000);
  put("ab/notes.txt", 10, 4000);
  put("ab/cd/readme", kFileBytes, 4000);
  put("photos/cat.jpg", 10, 4000);
  fs::create_directories(root() + "/ab/cd/" + block_name(id(5)));
  fs::create_symlink("/etc/passwd", root() + "/ab/cd/" + block_name(id(6)));
  fs::create_symlink(root(), root() + "/ab/ef");  // a loop
  put(place(id(7)));
  const DirectoryScan found = scan();
  ASSERT_EQ(found.blocks.size(), 1u);
  EXPECT_EQ(found.blocks[0].first.key, id(7).key);
  EXPECT_EQ(found.swept_temporaries, 0u);
  EXPECT_TRUE(fs::exists(root() + "/ab/notes.txt"));
}

TEST_F(DirectoryScanTest, ADirectoryThatIsNotThereIsEmpty) {
  for (const auto detail : {ScanDetail::kNames, ScanDetail::kFiles}) {
    EXPECT_TRUE(scan_directory(root() + "/nowhere", kFileBytes, 300, detail).blocks.empty());
  }
}

TEST_F(DirectoryScanTest, FilesThatVanishMeanwhileAreNoProblem) {
  for (uint64_t seed = 0; seed < 300; ++seed) put(place(id(seed)));
  std::thread eraser([this] {
    for (uint64_t seed = 0; seed < 300; ++seed) {
      unlink((root() + "/" + place(id(seed))).c_str());
    }
  });
  size_t last = 300;
  for (int round = 0; round < 30; ++round) {
    const size_t now = scan().blocks.size();
    EXPECT_LE(now, last);
    last = now;
  }
  eraser.join();
  EXPECT_TRUE(scan().blocks.empty());
}

}  // namespace
}  // namespace kvtransfer
