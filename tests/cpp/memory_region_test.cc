#include "kvtransfer/memory_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.h"
#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

TEST(MemoryRegion, IsPageAlignedZeroAndWritableToTheLastByte) {
  for (const RegionKind kind : {RegionKind::kAnonymous, RegionKind::kShared}) {
    MemoryRegion region(100'001, kind);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(region.data()) % 4096, 0u);
    EXPECT_EQ(region.bytes(), 100'001u);
    EXPECT_EQ(region.data()[100'000], 0);
    region.data()[100'000] = 7;
    EXPECT_EQ(region.fd() >= 0, kind == RegionKind::kShared);
  }
}

TEST(MemoryRegion, APeerProcessThatMapsTheDescriptorSeesAndChangesTheSameBytes) {
  MemoryRegion region(8192, RegionKind::kShared);
  region.data()[5] = 1;
  const pid_t child = fork();
  if (child == 0) {
    MemoryRegion mine = MemoryRegion::map_peer(region.fd(), 8192);
    const bool seen = mine.data()[5] == 1;
    mine.data()[6] = 2;
    _exit(seen ? 0 : 1);
  }
  int status;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(region.data()[6], 2);
}

TEST(MemoryRegion, ASharedRegionCanNotBeShrunkUnderItsUsers) {
  MemoryRegion region(8192, RegionKind::kShared);
  EXPECT_NE(ftruncate(region.fd(), 0), 0);
}

TEST(MemoryRegion, RefusesDescriptorsThatAPeerCouldShrinkOrThatAreTooSmall) {
  const Fd unsealed(memfd_create("x", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(unsealed.get(), 8192), 0);
  EXPECT_THROW(MemoryRegion::map_peer(unsealed.get(), 8192), Error);
  MemoryRegion region(8192, RegionKind::kShared);
  EXPECT_THROW(MemoryRegion::map_peer(region.fd(), 8193 + 4096), Error);
  EXPECT_THROW(MemoryRegion::map_peer(region.fd(), 0), Error);
  const Fd file(open("/dev/null", O_RDWR));
  EXPECT_THROW(MemoryRegion::map_peer(file.get(), 1), Error);
}

TEST(MemoryRegion, SaysNoInsteadOfDyingWhenMemoryCanNotBeHad) {
  EXPECT_THROW(MemoryRegion(0, RegionKind::kAnonymous), Error);
  EXPECT_THROW(MemoryRegion(size_t{1} << 62, RegionKind::kAnonymous), Error);
}

TEST(MemoryRegion, RequiredHugePagesAreEitherUsedOrRefusedWithAdvice) {
  try {
    MemoryRegion region(4 << 20, RegionKind::kAnonymous, HugePages::kRequired);
    EXPECT_EQ(region.page_bytes(), MemoryRegion::kHugePageBytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("nr_hugepages"), std::string::npos);
  }
}

TEST(MemoryRegion, MovingHandsTheMappingOver) {
  MemoryRegion a(4096, RegionKind::kAnonymous);
  uint8_t* data = a.data();
  const MemoryRegion b(std::move(a));
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);
}

}  // namespace
}  // namespace kvtransfer
