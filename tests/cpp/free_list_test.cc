// Linearizability and ABA by seeded interleavings: the atomics yield to a scheduler that lets
// exactly one thread run and picks the next at random, so that a seed is a reproducible
// interleaving.
#include "memory/free_list.h"

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "test_support.h"

namespace kvtransfer {
namespace {

class Interleaver {
 public:
  static Interleaver*& current() {
    static Interleaver* instance = nullptr;
    return instance;
  }
  static int& self() {
    thread_local int id = -1;
    return id;
  }

  Interleaver(int threads, uint64_t seed) : random_(seed), live_(threads, true) {
    turn_ = static_cast<int>(random_() % threads);
  }

  void enter(int id) {
    self() = id;
    std::unique_lock lock(mutex_);
    turned_.wait(lock, [&] { return turn_ == id; });
  }
  void yield() {
    std::unique_lock lock(mutex_);
    pass();
    turned_.wait(lock, [&] { return turn_ == self(); });
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    live_[self()] = false;
    self() = -1;
    pass();
  }

 private:
  void pass() {
    std::vector<int> candidates;
    for (size_t i = 0; i < live_.size(); ++i) {
      if (live_[i]) candidates.push_back(static_cast<int>(i));
    }
    turn_ = candidates.empty() ? -1 : candidates[random_() % candidates.size()];
    turned_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable turned_;
  std::mt19937_64 random_;
  std::vector<bool> live_;
  int turn_;
};

void interleave() {
  if (Interleaver::self() >= 0) Interleaver::current()->yield();
}

template <class T>
class YieldingAtomic {
 public:
  YieldingAtomic() = default;
  YieldingAtomic(T value) : value_(value) {}
  T load(std::memory_order) const {
    interleave();
    return value_.load();
  }
  void store(T value, std::memory_order) {
    interleave();
    value_.store(value);
  }
  T fetch_add(T more, std::memory_order) {
    interleave();
    return value_.fetch_add(more);
  }
  bool compare_exchange_weak(T& seen, T wanted, std::memory_order, std::memory_order) {
    interleave();
    return value_.compare_exchange_strong(seen, wanted);
  }

 private:
  std::atomic<T> value_{};
};

TEST(FreeList, EverySeededInterleavingKeepsEveryIndexWithExactlyOneOwner) {
  constexpr int kThreads = 3;
  constexpr uint32_t kSize = 4;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    FreeList<YieldingAtomic> list(kSize);
    std::vector<std::atomic<int>> owner(kSize);
    std::atomic<int> violations{0};
    Interleaver interleaver(kThreads, seed);
    Interleaver::current() = &interleaver;
    std::vector<std::thread> threads;
    for (int id = 0; id < kThreads; ++id) {
      threads.emplace_back([&, id] {
        interleaver.enter(id);
        std::mt19937 random(seed * 31 + id);
        for (int round = 0; round < 6; ++round) {
          std::vector<uint32_t> taken(1 + random() % 3);
          if (!list.take(taken)) continue;
          for (const uint32_t i : taken) violations += owner[i].exchange(id + 1) != 0;
          for (const uint32_t i : taken) {
            violations += owner[i].exchange(0) != id + 1;
            list.give(i);
          }
        }
        interleaver.leave();
      });
    }
    for (auto& thread : threads) thread.join();
    ASSERT_EQ(violations.load(), 0) << "seed " << seed;
    std::vector<uint32_t> all(kSize);
    ASSERT_TRUE(list.take(all)) << "seed " << seed;  // nothing was lost
    ASSERT_EQ(std::set<uint32_t>(all.begin(), all.end()).size(), kSize);
  }
}

TEST(FreeList, TakesAllOrNothing) {
  FreeList<> list(5);
  std::vector<uint32_t> three(3), again(3);
  ASSERT_TRUE(list.take(three));
  EXPECT_FALSE(list.take(again));
  EXPECT_EQ(list.available(), 2u);
  list.give(three[0]);
  EXPECT_TRUE(list.take(again));
  EXPECT_EQ(list.available(), 0u);
}

}  // namespace
}  // namespace kvtransfer
