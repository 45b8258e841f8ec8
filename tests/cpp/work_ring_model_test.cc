// The ring against random hardware: partial posts, delays, reordering and failures in any mix.
// Whatever happens, every request retires exactly once, in order, with a status that is true.
#include <errno.h>

#include <map>

#include "kvtransfer/work_ring.h"
#include "scripted_link.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::ScriptedLink;

struct Script {
  bool ordered;
  bool fails;
  uint32_t depth;
};

// Runs one random history; returns how the cookies retired.
class History {
 public:
  History(const Script& script, uint64_t seed)
      : script_(script),
        random_(seed),
        link_({script.depth, 100, script.ordered}),
        ring_(link_, {.capacity = 64,
                      .batch = 1 + static_cast<uint32_t>(random_() % 32),
                      .signal_interval = 1 + static_cast<uint32_t>(random_() % 20)}) {}

  void run() {
    for (int step = 0; step < 400; ++step) {
      post_some();
      if (random_() % 5 == 0) link_.answers.push_back({random_() % 5, ENOMEM});
      if (random_() % 2) ring_.doorbell();
      if (script_.fails && step == 250 && !link_.accepted.empty()) {
        link_.break_at(random_() % link_.accepted.size(), WorkStatus::kRemoteAccess, 1);
      } else if (random_() % 2) {
        complete_some();
      }
      collect();
    }
    link_.answers.clear();
    for (int i = 0; i < 300 && ring_.outstanding() > 0; ++i) {
      ring_.doorbell();
      if (script_.ordered) link_.complete(64);
      while (!script_.ordered && !link_.accepted.empty()) complete_some();
      collect();
    }
  }

  void check() const {
    EXPECT_EQ(retired_.size(), posted_) << "each request retires once";
    uint64_t next = 0;
    for (const auto& [cookie, status] : order_) {
      EXPECT_EQ(cookie, next++) << "in order of posting";
      if (!script_.fails) {
        EXPECT_EQ(status, WorkStatus::kSuccess);
      }
    }
    EXPECT_EQ(ring_.failed(), script_.fails && broken());
    const WorkRingCounters& c = ring_.counters();
    EXPECT_LE(c.doorbells, c.work_requests);
    EXPECT_LE(c.signalled, c.work_requests);
    EXPECT_LE(link_.outstanding_peak, script_.depth);
    if (ring_.failed()) {
      EXPECT_NE(ring_.failure().text, "");
    }
  }

  bool broken() const { return link_.failed(); }

 private:
  void post_some() {
    for (uint64_t n = random_() % 5; n > 0; --n) {
      WorkRequest request;
      request.length = 1 + random_() % 100;
      request.op = random_() % 3 == 0 ? LinkOp::kRead : LinkOp::kWrite;
      if (ring_.post(request, posted_)) ++posted_;
    }
  }

  void complete_some() {
    if (script_.ordered) {
      link_.complete(random_() % (script_.depth + 1));
    } else if (!link_.accepted.empty()) {
      const size_t at = random_() % link_.accepted.size();
      link_.say({link_.accepted[at].wr_id, WorkStatus::kSuccess});
      link_.accepted.erase(link_.accepted.begin() + static_cast<long>(at));
    }
  }

  void collect() {
    Retired out[7];
    for (size_t n; (n = ring_.poll(out)) > 0;) {
      for (size_t i = 0; i < n; ++i) {
        EXPECT_TRUE(retired_.emplace(out[i].cookie, out[i].status).second) << "retired twice";
        order_.emplace_back(out[i].cookie, out[i].status);
      }
    }
  }

  Script script_;
  std::mt19937_64 random_;
  ScriptedLink link_;
  WorkRing ring_;
  uint64_t posted_ = 0;
  std::map<uint64_t, WorkStatus> retired_;
  std::vector<std::pair<uint64_t, WorkStatus>> order_;
};

class WorkRingModelTest : public ::testing::TestWithParam<Script> {};

TEST_P(WorkRingModelTest, EveryRequestRetiresExactlyOnceInOrder) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    History history(GetParam(), seed);
    history.run();
    history.check();
    if (HasFailure()) {
      FAIL() << "seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Scripts, WorkRingModelTest,
                         ::testing::Values(Script{true, false, 1}, Script{true, false, 7},
                                           Script{true, false, 32}, Script{true, true, 7},
                                           Script{true, true, 32}, Script{false, false, 1},
                                           Script{false, false, 16}, Script{false, true, 16}),
                         [](const auto& info) {
                           return std::string(info.param.ordered ? "ordered" : "unordered") +
                                  (info.param.fails ? "failing" : "") +
                                  std::to_string(info.param.depth);
                         });

TEST(WorkRing, RequestsRetiredBeforeAFailureKeepTheirSuccess) {
  ScriptedLink link({32, 100, true});
  WorkRing ring(link, {.batch = 32, .signal_interval = 4});
  for (uint64_t i = 0; i < 12; ++i) {
    WorkRequest request;
    request.length = 10;
    ring.post(request, i);
  }
  ring.doorbell();
  link.complete(8);
  Retired out[32];
  EXPECT_EQ(ring.poll(out), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(out[i].status, WorkStatus::kSuccess);
  link.break_at(1, WorkStatus::kPeerLost, 0);
  const size_t rest = ring.poll(out);
  EXPECT_EQ(rest, 4u);
  EXPECT_EQ(out[1].status, WorkStatus::kPeerLost) << "the root cause keeps its own status";
  EXPECT_EQ(out[3].status, WorkStatus::kFlushed);
}

TEST(WorkRing, CountersAddUp) {
  ScriptedLink link({64, 100, true});
  WorkRing ring(link, {.batch = 16, .signal_interval = 8});
  for (uint64_t i = 0; i < 64; ++i) {
    WorkRequest request;
    request.op = i % 2 ? LinkOp::kRead : LinkOp::kWrite;
    request.length = 50;
    ASSERT_TRUE(ring.post(request, i));
  }
  const WorkRingCounters& c = ring.counters();
  EXPECT_EQ(c.work_requests, 64u);
  EXPECT_EQ(c.doorbells, 4u) << "one for each batch of sixteen";
  EXPECT_EQ(c.signalled, 8u);
  EXPECT_EQ(c.read_bytes, 32 * 50u);
  EXPECT_EQ(c.write_bytes, 32 * 50u);
}

}  // namespace
}  // namespace kvtransfer
