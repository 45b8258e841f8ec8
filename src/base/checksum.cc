#include "base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvtransfer {

uint64_t checksum(const void* data, size_t bytes, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace kvtransfer
