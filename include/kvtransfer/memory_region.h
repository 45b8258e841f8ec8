// MemoryRegion: page-aligned, pre-faulted host memory that lives at one address for its whole life.
//
// Registered once per device or NIC and never moved or resized. `kShared` regions are memfds: a
// peer process maps the descriptor it is handed (over a Unix socket), nothing is left behind in a
// file system when every holder has died, and the size is sealed so that no holder can shrink it
// under another. Owns its mapping and descriptor. Reading the accessors is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtransfer {

enum class RegionKind : uint8_t { kAnonymous, kShared };
enum class HugePages : uint8_t {
  kOff,
  kAuto,      // explicit 2 MiB pages if reserved, else transparent ones, else 4 KiB
  kRequired,  // throw Error(kUnsupported) without explicit 2 MiB pages
};

class MemoryRegion {
 public:
  static constexpr size_t kPageBytes = 4096;
  static constexpr size_t kHugePageBytes = size_t{2} << 20;

  // Throws Error(kInvalidArgument) for 0 bytes, Error(kExhausted) when the system refuses.
  MemoryRegion(size_t bytes, RegionKind kind, HugePages huge = HugePages::kAuto);
  // Maps a peer's shared region from a descriptor (which the caller keeps). Throws Error(kMismatch)
  // unless it is a memfd sealed against shrinking with at least `bytes` bytes: a peer must not be
  // able to make us fault.
  static MemoryRegion map_peer(int fd, size_t bytes);

  MemoryRegion(MemoryRegion&& other) noexcept;
  MemoryRegion& operator=(MemoryRegion&&) = delete;
  ~MemoryRegion();

  uint8_t* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  // The memfd, or -1 for anonymous memory.
  int fd() const noexcept { return fd_; }
  // Bytes of the pages really in use: kHugePageBytes for reserved huge pages, else kPageBytes
  // (transparent huge pages are the kernel's to give and can't be promised).
  size_t page_bytes() const noexcept { return page_bytes_; }

 private:
  MemoryRegion() = default;

  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  size_t mapped_ = 0;
  size_t page_bytes_ = kPageBytes;
  int fd_ = -1;
};

}  // namespace kvtransfer
