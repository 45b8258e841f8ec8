// The hot path allocates nothing and takes no lock: counted at malloc and pthread_mutex_lock.
#include <dlfcn.h>
#include <pthread.h>

#include "kvtransfer/work_ring.h"
#include "test_support.h"
#include "transport/null_link.h"
#include "verbs_fixture.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVT_COUNTS 0  // the sanitizers have malloc to themselves
#else
#define KVT_COUNTS 1
#endif

namespace {
thread_local uint64_t allocations = 0;
thread_local uint64_t locks = 0;
}  // namespace

#if KVT_COUNTS
extern "C" {
void* __libc_malloc(size_t bytes);
__attribute__((visibility("default"))) void* malloc(size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}
__attribute__((visibility("default"))) int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  using Lock = int (*)(pthread_mutex_t*);
  static Lock real = reinterpret_cast<Lock>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  ++locks;
  return real(mutex);
}
}
#endif

namespace kvtransfer {
namespace {

struct Cost {
  uint64_t allocations, locks;
};

template <typename Work>
Cost cost_of(Work work) {
  const uint64_t before = allocations, locked = locks;
  work();
  return {allocations - before, locks - locked};
}

// Posts, rings and retires; everything of the hot path.
void drive(WorkRing& ring, uint32_t rounds) {
  WorkRequest request;
  request.length = 64;
  Retired retired[64];
  for (uint32_t round = 0; round < rounds; ++round) {
    for (uint32_t i = 0; i < 32; ++i) ring.post(request, i);
    ring.doorbell();
    while (ring.outstanding() > 0 && !ring.failed()) ring.poll(retired);
  }
}

TEST(WorkRingCost, TheCountersCount) {
  if (!KVT_COUNTS) GTEST_SKIP() << "a sanitizer owns malloc";
  const Cost cost = cost_of([] {
    const auto memory = std::make_unique<std::array<char, 100>>();
    asm volatile("" : : "r"(memory.get()) : "memory");
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
  });
  EXPECT_GE(cost.allocations, 1u);
  EXPECT_EQ(cost.locks, 1u);
}

TEST(WorkRingCost, PostingAllocatesNothingAndTakesNoLock) {
  if (!KVT_COUNTS) GTEST_SKIP() << "a sanitizer owns malloc";
  const auto link = make_null_link();
  WorkRing ring(*link);
  drive(ring, 2);
  const Cost cost = cost_of([&] { drive(ring, 1000); });
  EXPECT_EQ(cost.allocations, 0u);
  EXPECT_EQ(cost.locks, 0u);
  EXPECT_EQ(ring.counters().work_requests, 1002u * 32);
}

// The device's own library may lock; ours must not allocate above it.
TEST(WorkRingCost, VerbsPostingAllocatesNothing) {
  if (!KVT_COUNTS) GTEST_SKIP() << "a sanitizer owns malloc";
  KVT_NEED_VERBS();
  testing::VerbsPair pair;
  drive(*pair.ring, 4);
  EXPECT_EQ(cost_of([&] { drive(*pair.ring, 20); }).allocations, 0u);
  EXPECT_FALSE(pair.ring->failed()) << pair.ring->failure().text;
}

}  // namespace
}  // namespace kvtransfer
