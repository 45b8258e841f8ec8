#include "transport/null_link.h"

#include <errno.h>

#include "kvtransfer/work_ring.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

TEST(NullLink, CompletesWhatIsSignalledAndNothingElse) {
  const auto link = make_null_link();
  WorkRequest list[3];
  list[1].signalled = true;
  list[1].wr_id = 41;
  EXPECT_TRUE(link->arm());
  EXPECT_EQ(link->post(list).accepted, 3u);
  EXPECT_FALSE(link->arm()) << "a completion is there already";
  WorkCompletion out[4];
  ASSERT_EQ(link->poll(out), 1u);
  EXPECT_EQ(out[0].wr_id, 41u);
  EXPECT_EQ(out[0].status, WorkStatus::kSuccess);
  EXPECT_EQ(link->poll(out), 0u);
}

TEST(NullLink, TakenDownItRefusesAndDrainsOnceItsCompletionsAreTaken) {
  const auto link = make_null_link();
  WorkRequest request;
  request.signalled = true;
  link->post({&request, 1});
  link->fail();
  EXPECT_TRUE(link->failed());
  EXPECT_FALSE(link->drained());
  EXPECT_EQ(link->post({&request, 1}).error, ECONNRESET);
  WorkCompletion out[1];
  EXPECT_EQ(link->poll(out), 1u);
  EXPECT_TRUE(link->drained());
}

TEST(NullLink, ARingOverItRetiresEverythingForever) {
  const auto link = make_null_link();
  WorkRing ring(*link, {.capacity = 300, .batch = 7});
  WorkRequest request;
  request.length = 10;
  Retired retired[50];
  uint64_t posted = 0, done = 0;
  std::mt19937 random(4);
  while (done < 50'000) {
    for (uint32_t i = random() % 40; i > 0 && ring.post(request, posted); --i) ++posted;
    ring.doorbell();
    const size_t n = ring.poll(std::span(retired).first(1 + random() % 50));
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(retired[i].cookie, done++);
  }
  EXPECT_FALSE(ring.failed());
}

}  // namespace
}  // namespace kvtransfer
