// What two processes of one machine exchange to become shm peers, and what they share afterwards.
//
// Hello (one SEQPACKET message on a Unix socket, both ways), with the descriptors of the mailbox,
// its eventfd and every region attached:
//
//   | magic 8 | version u32 | num_regions u32 | epoch u64 | name 64 | region bytes u64 x 8 |
//
// Mailbox: a ring of immediates in a sealed memfd of the receiver. One writer (the peer's progress
// thread), one reader (ours). Its indices are data from another process: both sides check them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "kvtransfer/memory_region.h"

namespace kvtransfer {

constexpr uint32_t kShmVersion = 1;
constexpr uint32_t kShmMaxRegions = 8;
constexpr uint32_t kMailboxSlots = 8192;

struct ShmHello {
  char magic[8];  // "KVTSHMEM"
  uint32_t version;
  uint32_t num_regions;
  uint64_t epoch;
  char name[64];  // zero-terminated
  uint64_t region_bytes[kShmMaxRegions];
};
static_assert(sizeof(ShmHello) == 152);

struct Mailbox {
  alignas(64) std::atomic<uint64_t> tail;  // written by the sender; release pairs with the reader
  alignas(64) std::atomic<uint64_t> head;  // written by the reader; release pairs with the sender
  std::atomic<uint32_t> slots[kMailboxSlots];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct ShmIdentity {
  std::string name;
  uint64_t epoch = 0;
  std::vector<std::shared_ptr<MemoryRegion>> regions;  // all kShared
};

// What a handshake yields: everything a ShmLink needs.
struct ShmPeer {
  Fd socket;  // stays open; its hang-up tells that the peer died
  std::string name;
  uint64_t epoch = 0;
  std::vector<MemoryRegion> regions;  // the peer's, mapped
  MemoryRegion inbox;                 // ours: the peer writes immediates here
  MemoryRegion outbox;                // the peer's
  Fd inbox_event;
  Fd outbox_event;
};

// Exchanges hellos on a connected socket. Throws Error(kMismatch | kTimeout | kPeerLost).
ShmPeer shm_handshake(Fd socket, const ShmIdentity& self, int64_t deadline_ns);

}  // namespace kvtransfer
