#include "base/checksum.h"

#include "base/checksum_kernel.h"

namespace kvtransfer {

namespace {

struct Choice {
  ChecksumKernel kernel;
  const char* name;
};

Choice choose() noexcept {
#if defined(KVTRANSFER_X86)
  if (__builtin_cpu_supports("avx512f")) return {checksum_avx512, "avx512"};
  if (__builtin_cpu_supports("avx2")) return {checksum_avx2, "avx2"};
#endif
  return {checksum_kernel, "baseline"};
}

// Not a global: static objects of other files use checksums.
const Choice& choice() noexcept {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

uint64_t checksum(const void* data, size_t bytes, uint64_t seed) noexcept {
  return choice().kernel(data, bytes, seed);
}

const char* checksum_backend() noexcept {
  return choice().name;
}

}  // namespace kvtransfer
