#include "kvtransfer/layer_stream.h"

#include <poll.h>

#include <thread>

#include "base/bounded_queue.h"
#include "base/notifier.h"
#include "test_support.h"
#include "traffic/token_bucket.h"

namespace kvtransfer {
namespace {

using testing::in_seconds;

TEST(LayerStream, ALayerIsReadyAfterItsExpectedArrivalsFromAnySource) {
  LayerStream stream(3, 3);
  stream.arrive(1);
  stream.arrive(1, 1);
  EXPECT_FALSE(stream.ready(1));
  stream.arrive(1);
  EXPECT_TRUE(stream.ready(1));
  EXPECT_FALSE(stream.ready(0));
  EXPECT_EQ(stream.wait(1, in_seconds(0)), WaitResult::kReady);
  EXPECT_EQ(stream.wait(0, in_seconds(0.01)), WaitResult::kTimeout);
}

TEST(LayerStream, WithNothingExpectedEveryLayerIsReady) {
  LayerStream stream(2, 0);
  EXPECT_TRUE(stream.ready(0));
  EXPECT_EQ(stream.wait(1, in_seconds(0)), WaitResult::kReady);
}

TEST(LayerStream, TheExpectationMayComeLate) {
  LayerStream stream(1, LayerStream::kUnknown);
  stream.arrive(0, 2);
  EXPECT_FALSE(stream.ready(0));
  std::thread other([&] { stream.set_expected(2); });
  EXPECT_EQ(stream.wait(0, in_seconds(5)), WaitResult::kReady);
  other.join();
}

TEST(LayerStream, AFailureWakesWaitersOnceAndReadyLayersStayReady) {
  LayerStream stream(2, 1);
  stream.arrive(0);
  std::thread other([&] {
    stream.fail({ErrorCode::kCorrupt, 0, "first"});
    stream.fail({ErrorCode::kIo, 0, "second"});
  });
  EXPECT_EQ(stream.wait(1, in_seconds(5)), WaitResult::kFailed);
  other.join();
  EXPECT_EQ(stream.failure().text, "first");
  EXPECT_EQ(stream.wait(0, in_seconds(5)), WaitResult::kReady);
  EXPECT_EQ(stream.wait(1, in_seconds(5)), WaitResult::kFailed);
}

TEST(LayerStream, ArrivalsOfUnknownLayersAreIgnored) {
  LayerStream stream(2, 1);
  stream.arrive(2);
  stream.arrive(UINT32_MAX);
  EXPECT_FALSE(stream.ready(0) || stream.ready(1));
  EXPECT_THROW(LayerStream(0), Error);
  EXPECT_THROW(LayerStream(5000), Error);
}

TEST(LayerStream, StallTimeIsCountedPerLayer) {
  LayerStream stream(2, 1);
  stream.wait(0, in_seconds(0.02));
  EXPECT_GE(stream.stall_ns(0), 15'000'000u);
  EXPECT_EQ(stream.stall_ns(1), 0u);
}

TEST(LayerStream, ManyWaitersAndArriversMissNothing) {
  for (int round = 0; round < 30; ++round) {
    LayerStream stream(8, 3);
    uint64_t data[8][3] = {};
    std::vector<std::thread> threads;
    for (int source = 0; source < 3; ++source) {
      threads.emplace_back([&, source] {
        for (uint32_t layer = 0; layer < 8; ++layer) {
          data[layer][source] = layer + 1;  // visible to whoever sees the layer ready
          stream.arrive(layer);
        }
      });
    }
    std::atomic<int> wrong{0};
    for (int waiter = 0; waiter < 5; ++waiter) {
      threads.emplace_back([&] {
        for (uint32_t layer = 0; layer < 8; ++layer) {
          wrong += stream.wait(layer, in_seconds(10)) != WaitResult::kReady;
          for (const uint64_t value : data[layer]) wrong += value != layer + 1;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(wrong.load(), 0);
  }
}

TEST(LayerStream, RingsItsNotifiersForReadyLayersAndPublications) {
  auto events = std::make_shared<Notifier>(), published = std::make_shared<Notifier>();
  LayerStream stream(1, 2, events, published);
  const auto rung = [](const Notifier& n) {
    pollfd ready{n.fd(), POLLIN, 0};
    return poll(&ready, 1, 0) > 0;
  };
  stream.arrive(0);
  EXPECT_FALSE(rung(*events));
  stream.publish(0);
  EXPECT_TRUE(rung(*events) && rung(*published));
  events->drain();
  EXPECT_FALSE(rung(*events));
}

TEST(BoundedQueue, ManyProducersAndOneConsumerLoseNothingAndKeepEachOnesOrder) {
  BoundedQueue<uint64_t> queue(64);
  constexpr uint64_t kEach = 5000;
  std::vector<std::thread> producers;
  for (uint64_t id = 0; id < 4; ++id) {
    producers.emplace_back([&, id] {
      for (uint64_t i = 0; i < kEach; ++i) {
        uint64_t value = id << 32 | i;
        while (!queue.push(value)) std::this_thread::yield();
      }
    });
  }
  std::vector<uint64_t> next(4);
  for (uint64_t got = 0; got < 4 * kEach;) {
    uint64_t value;
    if (!queue.pop(value)) continue;
    ASSERT_EQ(value & UINT32_MAX, next[value >> 32]++);
    ++got;
  }
  for (auto& producer : producers) producer.join();
  uint64_t value;
  EXPECT_FALSE(queue.pop(value));
}

TEST(BoundedQueue, RefusesWhenFullAndKeepsTheValue) {
  BoundedQueue<std::unique_ptr<int>> queue(2);
  for (int i = 0; i < 2; ++i) {
    auto value = std::make_unique<int>(i);
    ASSERT_TRUE(queue.push(value));
  }
  auto kept = std::make_unique<int>(7);
  EXPECT_FALSE(queue.push(kept));
  ASSERT_NE(kept, nullptr);
}

TEST(TokenBucket, TheAverageRateHoldsWhateverTheSizes) {
  TokenBucket bucket;
  bucket.set_rate(1'000'000);  // a byte a microsecond
  std::mt19937 random(1);
  int64_t now = 1'000'000'000;
  const int64_t begin = now;
  uint64_t moved = 0;
  for (int i = 0; i < 2000; ++i) {
    const uint64_t bytes = 1 + random() % 100'000;
    if (bucket.take(bytes, now)) {
      moved += bytes;
    } else {
      ASSERT_GT(bucket.ready_at(), now);
      now = bucket.ready_at();
      ASSERT_TRUE(bucket.take(bytes, now)) << "ready_at() must be the truth";
      moved += bytes;
    }
  }
  const double rate = static_cast<double>(moved) / static_cast<double>(now - begin) * 1e9;
  EXPECT_NEAR(rate, 1e6, 5e3);
}

TEST(TokenBucket, WithoutARateNothingIsHeldBack) {
  TokenBucket bucket;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(bucket.take(1 << 30, 5));
}

}  // namespace
}  // namespace kvtransfer
