// Compiled for avx512 (CMakeLists.txt); called only where the processor has it.
#include "base/checksum_kernel.h"

namespace kvtransfer {

uint64_t checksum_avx512(const void* data, size_t bytes, uint64_t seed) noexcept {
  return checksum_kernel(data, bytes, seed);
}

}  // namespace kvtransfer
