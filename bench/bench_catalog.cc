// The catalog with a million blocks: bytes of heap per block, building, lookup of a chain of 2,000,
// planning the eviction of 5 %. Prints one line a repeat.
//
//   g++ -std=c++20 -O2 -Iinclude -Isrc bench/bench_catalog.cc src/store/catalog.cc
//   ./a.out
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>

#include "store/catalog.h"

using namespace kvtransfer;

constexpr size_t kChains = 500, kLength = 2000, kBlocks = kChains * kLength;

template <typename Work>
static double microseconds(Work work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  return spent.count();
}

int main() {
  std::mt19937_64 random(1);
  const auto make_key = [&] {
    BlockKey key;
    for (size_t i = 0; i < key.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(key.data() + i, &word, sizeof word);
    }
    return key;
  };
  const BlockKey root = make_key();
  std::vector<std::pair<BlockId, uint64_t>> found;
  found.reserve(kBlocks);
  for (size_t chain = 0; chain < kChains; ++chain) {
    BlockKey parent = root;
    for (size_t i = 0; i < kLength; ++i) {
      found.push_back({{make_key(), parent}, chain + 1});
      parent = found.back().first.key;
    }
  }
  for (int repeat = 0; repeat < 5; ++repeat) {
    Catalog catalog(root);
    const double build = microseconds([&] { catalog.reserve(found.size());
    catalog.merge(found); });
    const auto lookup = [&] {
      return microseconds([&] {
        for (size_t i = 0; i < kLength; ++i) catalog.touch(found[kLength * 7 + i].first.key);
      });
    };
    const double first = lookup();
    double warm = first;
    for (int i = 0; i < 20; ++i) warm = std::min(warm, lookup());
    const double plan = microseconds([&] { catalog.plan_eviction(kBlocks * 95 / 100); });
    std::printf(
        "%.0f B a block, built in %.0f ms, lookup of 2000: first %.0f us, warm %.0f us, "
        "plan of 5 %%: %.0f ms\n",
        static_cast<double>(catalog.memory_bytes()) / kBlocks, build / 1000, first, warm,
        plan / 1000);
  }
  return 0;
}
