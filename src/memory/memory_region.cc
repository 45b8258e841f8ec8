#include "kvtransfer/memory_region.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/fd.h"
#include "kvtransfer/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvtransfer {

namespace {

size_t round_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// A sealed memfd of `bytes`, or an invalid Fd with errno set.
Fd open_memfd(size_t bytes, bool huge) {
  Fd fd(memfd_create("kvtransfer", MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB : 0u)));
  if (!fd.valid() || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    const int saved = errno;
    fd.reset();
    errno = saved;
  }
  return fd;
}

void* map(size_t bytes, int fd, int extra_flags) {
  const int flags = (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | extra_flags;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return at == MAP_FAILED ? nullptr : at;
}

// Every page present before the first transfer: no fault on the hot path, and "no memory" is an
// error here instead of a SIGBUS or the OOM killer later.
bool prefault(void* at, size_t bytes) {
  if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return true;
  if (errno != EINVAL) return false;
  for (size_t i = 0; i < bytes; i += MemoryRegion::kPageBytes) {  // kernels before 5.14
    static_cast<volatile uint8_t*>(at)[i] = 0;
  }
  return true;
}

struct Mapping {
  void* at = nullptr;
  size_t bytes = 0;
  Fd fd;
};

Mapping try_map(size_t bytes, RegionKind kind, bool huge) {
  Mapping mapping;
  mapping.bytes = round_up(bytes, huge ? MemoryRegion::kHugePageBytes : MemoryRegion::kPageBytes);
  if (kind == RegionKind::kShared) {
    mapping.fd = open_memfd(mapping.bytes, huge);
    if (!mapping.fd.valid()) return mapping;
  }
  const int extra = huge && kind == RegionKind::kAnonymous ? MAP_HUGETLB : 0;
  void* at = map(mapping.bytes, mapping.fd.get(), extra);
  if (at == nullptr) return mapping;
  if (!huge) madvise(at, mapping.bytes, MADV_HUGEPAGE);  // a wish; refusal is fine
  if (prefault(at, mapping.bytes)) {
    mapping.at = at;
  } else {
    const int saved = errno;
    munmap(at, mapping.bytes);
    errno = saved;
  }
  return mapping;
}

}  // namespace

MemoryRegion::MemoryRegion(size_t bytes, RegionKind kind, HugePages huge) : bytes_(bytes) {
  if (bytes == 0) throw Error(ErrorCode::kInvalidArgument, "MemoryRegion: 0 bytes");
  Mapping mapping;
  if (huge != HugePages::kOff && bytes >= kHugePageBytes) mapping = try_map(bytes, kind, true);
  if (mapping.at != nullptr) {
    page_bytes_ = kHugePageBytes;
  } else if (huge == HugePages::kRequired) {
    throw Error(ErrorCode::kUnsupported,
                "MemoryRegion: no " + std::to_string(bytes) +
                    " bytes of reserved 2 MiB pages (reserve them: sysctl vm.nr_hugepages=N)",
                errno);
  } else {
    mapping = try_map(bytes, kind, false);
  }
  if (mapping.at == nullptr) {
    throw Error(ErrorCode::kExhausted,
                "MemoryRegion: cannot map " + std::to_string(bytes) + " bytes", errno);
  }
  data_ = static_cast<uint8_t*>(mapping.at);
  mapped_ = mapping.bytes;
  fd_ = mapping.fd.release();
}

MemoryRegion MemoryRegion::map_peer(int fd, size_t bytes) {
  struct stat info;
  const int seals = fcntl(fd, F_GET_SEALS);
  if (bytes == 0 || fstat(fd, &info) != 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<uint64_t>(info.st_size) < bytes) {
    throw Error(ErrorCode::kMismatch, "MemoryRegion: the peer's descriptor is no sealed memfd of " +
                                          std::to_string(bytes) + " bytes");
  }
  void* at = map(bytes, fd, 0);
  if (at == nullptr) {
    throw Error(ErrorCode::kExhausted,
                "MemoryRegion: cannot map the peer's " + std::to_string(bytes) + " bytes", errno);
  }
  MemoryRegion region;
  region.data_ = static_cast<uint8_t*>(at);
  region.bytes_ = region.mapped_ = bytes;
  return region;
}

MemoryRegion::MemoryRegion(MemoryRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_(std::exchange(other.mapped_, 0)),
      page_bytes_(other.page_bytes_),
      fd_(std::exchange(other.fd_, -1)) {}

MemoryRegion::~MemoryRegion() {
  if (data_ != nullptr) munmap(data_, mapped_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace kvtransfer
