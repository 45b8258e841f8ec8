#include "base/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtransfer {

#if defined(__x86_64__)
namespace {

__attribute__((target("avx2"))) void copy_streaming(uint8_t* to, const uint8_t* from,
                                                    size_t bytes) noexcept {
  const size_t head = (32 - reinterpret_cast<uintptr_t>(to) % 32) % 32;
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + 128 <= bytes; at += 128) {
    const auto* source = reinterpret_cast<const __m256i*>(from + at);
    auto* target = reinterpret_cast<__m256i*>(to + at);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2);
    const __m256i d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c);
    _mm256_stream_si256(target + 3, d);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // orders the weak stores before the caller's release store
}

const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;

}  // namespace

void copy_bytes(void* to, const void* from, size_t bytes) noexcept {
  if (bytes < kStreamingBytes || !kHasAvx2) {
    std::memcpy(to, from, bytes);
  } else {
    copy_streaming(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes);
  }
}
#else
void copy_bytes(void* to, const void* from, size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace kvtransfer
