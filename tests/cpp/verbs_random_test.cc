// Random mixes of writes, reads and immediates on real queue pairs against a model of both
// memories.
#include <deque>

#include "verbs_fixture.h"

namespace kvtransfer {
namespace {

using namespace testing;  // NOLINT: test vocabulary

struct Mix {
  const char* name;
  PostMethod method;
  uint32_t queue_pairs, batch, send_depth;
};
void PrintTo(const Mix& mix, std::ostream* out) {
  *out << mix.name;
}

class VerbsRandomTest : public ::testing::TestWithParam<Mix> {
 protected:
  static constexpr uint64_t kCell = 2048, kCells = 200;

  void SetUp() override {
    KVT_NEED_VERBS();
    VerbsOptions options[2] = {verbs_options(0), verbs_options(1)};
    for (VerbsOptions& o : options) {
      o.post_method = GetParam().method;
      o.queue_pairs = GetParam().queue_pairs;
      o.send_depth = GetParam().send_depth;
    }
    pair_ = std::make_unique<VerbsPair>(options[0], options[1], kCells * kCell);
    ring_ = std::make_unique<WorkRing>(*pair_->a, WorkRingOptions{.batch = GetParam().batch});
    fill_random(pair_->here->data(), kCells * kCell, 1);
    fill_random(pair_->there->data(), kCells * kCell, 2);
    here_.assign(pair_->here->data(), pair_->here->data() + kCells * kCell);
    there_.assign(pair_->there->data(), pair_->there->data() + kCells * kCell);
  }
  // Cells touched by requests in flight; requests that share one would have no defined order.
  bool busy(uint64_t cell) const { return in_use_[cell]; }

  std::unique_ptr<VerbsPair> pair_;
  std::unique_ptr<WorkRing> ring_;
  std::vector<uint8_t> here_, there_;  // the model
  std::vector<bool> in_use_ = std::vector<bool>(kCells, false);
};

TEST_P(VerbsRandomTest, MemoryAndImmediatesAreThoseOfTheModel) {
  std::mt19937_64 random(GetParam().batch * 31 + GetParam().queue_pairs);
  std::deque<uint32_t> told;
  uint32_t heard = 0, posted = 0, retired_count = 0;
  const int64_t deadline = in_seconds(60);
  while (retired_count < 1500 && now_ns() < deadline) {
    for (uint64_t tries = random() % 24; tries > 0 && posted < 1500; --tries) {
      const uint64_t cell = random() % kCells;
      if (busy(cell)) continue;
      const uint64_t offset = cell * kCell + random() % 64;
      const uint64_t length = random() % 5 == 0 ? 0 : 1 + random() % (kCell - 64);
      const auto op = static_cast<LinkOp>(random() % 3);
      if (op == LinkOp::kRead && length == 0) continue;
      if (!ring_->post(VerbsPair::request(op, offset, offset, length, posted), cell)) break;
      in_use_[cell] = true;
      if (op == LinkOp::kRead) {
        std::copy_n(there_.begin() + static_cast<long>(offset), length,
                    here_.begin() + static_cast<long>(offset));
      } else {
        std::copy_n(here_.begin() + static_cast<long>(offset), length,
                    there_.begin() + static_cast<long>(offset));
      }
      if (op == LinkOp::kWriteWithImmediate) told.push_back(posted);
      ++posted;
    }
    ring_->doorbell();
    Retired retired[32];
    const size_t n = ring_->poll(retired);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(retired[i].status, WorkStatus::kSuccess) << ring_->failure().text;
      in_use_[retired[i].cookie] = false;
      ++retired_count;
    }
    WorkCompletion nothing[1];
    pair_->b->poll(nothing);
    uint32_t values[16];
    const size_t arrived = pair_->b->poll_immediates(values);
    for (size_t i = 0; i < arrived; ++i, ++heard) {
      ASSERT_FALSE(told.empty());
      ASSERT_EQ(values[i], told.front()) << "immediates come in the order of their posting";
      told.pop_front();
    }
  }
  ASSERT_EQ(retired_count, 1500u);
  while (!told.empty() && now_ns() < deadline) {
    WorkCompletion nothing[1];
    pair_->b->poll(nothing);
    uint32_t value[1];
    if (pair_->b->poll_immediates(value) == 1) told.pop_front();
  }
  EXPECT_TRUE(told.empty());
  EXPECT_EQ(std::memcmp(pair_->here->data(), here_.data(), here_.size()), 0);
  EXPECT_EQ(std::memcmp(pair_->there->data(), there_.data(), there_.size()), 0);
}

INSTANTIATE_TEST_SUITE_P(Mixes, VerbsRandomTest,
                         ::testing::Values(Mix{"one_by_one", PostMethod::kPostSend, 1, 1, 256},
                                           Mix{"lists", PostMethod::kPostSend, 1, 32, 256},
                                           Mix{"wr_api", PostMethod::kWorkRequestApi, 1, 32, 256},
                                           Mix{"shallow", PostMethod::kWorkRequestApi, 1, 8, 8},
                                           Mix{"striped", PostMethod::kPostSend, 2, 32, 64},
                                           Mix{"striped_wr_api", PostMethod::kWorkRequestApi, 5, 16,
                                               16}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvtransfer
