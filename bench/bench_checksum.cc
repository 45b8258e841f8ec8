// GB/s of one core over Layer Blocks that lie in memory and not in a cache: XXH3-64 in one stream,
// ours in four, CRC32C by the processor in one and in four, and the plain sum of all words.
//
//   g++ -O2 -std=c++20 -march=native -Isrc bench/bench_checksum.cc -o build/bench_checksum
#include <immintrin.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/checksum_kernel.h"
#include "base/clock.h"

using namespace kvtransfer;

namespace {

constexpr size_t kTotal = size_t{512} << 20;
volatile uint64_t sink;

template <size_t kStreams>
uint64_t crc(const uint8_t* data, size_t bytes) {
  uint64_t sums[kStreams] = {};
  const size_t words = bytes / 8 / kStreams;
  for (size_t i = 0; i < words; ++i) {
    for (size_t s = 0; s < kStreams; ++s) {
      uint64_t word;
      std::memcpy(&word, data + 8 * (s * words + i), 8);
      sums[s] = _mm_crc32_u64(sums[s], word);
    }
  }
  uint64_t all = 0;
  for (const uint64_t sum : sums) all ^= sum;
  return all;
}

uint64_t add(const uint8_t* data, size_t bytes) {
  uint64_t sums[8] = {};
  for (size_t at = 0; at < bytes; at += sizeof sums) {
    uint64_t words[8];
    std::memcpy(words, data + at, sizeof words);
    for (int i = 0; i < 8; ++i) sums[i] += words[i];
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
}

template <typename Function>
void measure(const char* name, const std::vector<uint8_t>& data, size_t layer, Function function) {
  std::vector<double> speeds;
  for (int repeat = 0; repeat < 9; ++repeat) {
    const int64_t begin = now_ns();
    for (size_t at = 0; at < kTotal; at += layer) sink = function(data.data() + at, layer);
    speeds.push_back(static_cast<double>(kTotal) / static_cast<double>(now_ns() - begin));
  }
  std::sort(speeds.begin(), speeds.end());
  std::printf("  %-22s %5.1f GB/s (%.1f-%.1f)\n", name, speeds[4], speeds.front(), speeds.back());
}

}  // namespace

int main() {
  std::vector<uint8_t> data(kTotal, 7);
  for (const size_t layer : {size_t{16384}, size_t{65536}, size_t{262144}}) {
    std::printf("layers of %zu bytes\n", layer);
    measure("XXH3-64", data, layer,
            [](const uint8_t* p, size_t n) { return XXH3_64bits_withSeed(p, n, 1); });
    measure("XXH3-64, 4 streams", data, layer,
            [](const uint8_t* p, size_t n) { return checksum_kernel(p, n, 1); });
    measure("CRC32C", data, layer, crc<1>);
    measure("CRC32C, 4 streams", data, layer, crc<4>);
    measure("sum (memory's limit)", data, layer, add);
  }
}
