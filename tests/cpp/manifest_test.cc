#include "store/manifest.h"

#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::make_key;

TEST(Manifest, AnyLayoutComesBackAsItWas) {
  std::mt19937 random(4);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::vector<uint32_t>> layers(1 + random() % 12);
    for (auto& layer : layers) {
      layer.resize(1 + random() % 3);
      for (uint32_t& plane : layer)
        plane = 1 + random() % 3 * 100;  // runs of equal ones are likely
    }
    const Manifest manifest{make_key(round), BlockLayout(1 + random() % 300, layers)};
    const Manifest parsed = parse_manifest(manifest_text(manifest));
    EXPECT_EQ(parsed.name_space, manifest.name_space);
    EXPECT_TRUE(parsed.layout == manifest.layout);
    EXPECT_EQ(manifest_text(parsed), manifest_text(manifest));
  }
}

TEST(Manifest, RunsOfEqualLayersAreOneLine) {
  const std::string text = manifest_text({make_key(1), BlockLayout(64, {{8}, {8}, {4, 4}, {8}})});
  EXPECT_NE(text.find("layers 2 x 8\nlayers 1 x 4 4\nlayers 1 x 8\n"), std::string::npos) << text;
}

TEST(Manifest, EveryFlippedBitIsAnErrorOrAnotherManifest) {
  const std::string text = manifest_text({make_key(1), BlockLayout(3, 8, {64, 32})});
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string damaged = text;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    try {
      EXPECT_NE(manifest_text(parse_manifest(damaged)), text) << "bit " << bit;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMismatch);
    }
  }
}

}  // namespace
}  // namespace kvtransfer
