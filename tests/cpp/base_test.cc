// The smallest parts: errors, descriptors, the notifier, futexes, the clock.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <set>
#include <thread>

#include "base/clock.h"
#include "base/fd.h"
#include "base/futex.h"
#include "base/notifier.h"
#include "kvtransfer/error.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

bool readable(int fd) {
  pollfd ready{fd, POLLIN, 0};
  return poll(&ready, 1, 0) > 0;
}

bool is_open(int fd) {
  return fcntl(fd, F_GETFD) >= 0;
}

TEST(Error, EveryCodeHasItsOwnStableWord) {
  std::set<std::string_view> words;
  for (uint8_t code = 0; code <= static_cast<uint8_t>(ErrorCode::kCancelled); ++code) {
    const std::string_view word = error_code_name(static_cast<ErrorCode>(code));
    EXPECT_NE(word, "unknown");
    EXPECT_TRUE(words.insert(word).second) << word;
  }
  EXPECT_EQ(error_code_name(ErrorCode::kNoSpace), "no_space");
  EXPECT_EQ(error_code_name(static_cast<ErrorCode>(200)), "unknown");
}

TEST(Error, TheTextCarriesTheErrnoInWords) {
  const Error error(ErrorCode::kIo, "reading x", ENOENT);
  EXPECT_STREQ(error.what(), "reading x: No such file or directory");
  EXPECT_EQ(error.code(), ErrorCode::kIo);
  EXPECT_EQ(error.sys_errno(), ENOENT);
  EXPECT_STREQ(Error(ErrorCode::kIo, "plain").what(), "plain");
}

TEST(Error, AnOutcomeIsFineUntilItHasACode) {
  Outcome outcome;
  EXPECT_TRUE(outcome.ok());
  outcome.code = ErrorCode::kTimeout;
  EXPECT_FALSE(outcome.ok());
}

TEST(Fd, ClosesOnceAndMovesOwnership) {
  const int raw = open("/dev/null", O_RDONLY);
  {
    Fd a(raw);
    Fd b(std::move(a));
    EXPECT_FALSE(a.valid());
    EXPECT_EQ(b.get(), raw);
    Fd c;
    c = std::move(b);
    EXPECT_EQ(c.get(), raw);
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

TEST(Fd, ReleaseGivesTheDescriptorAwayAndResetClosesTheOldOne) {
  Fd a(open("/dev/null", O_RDONLY));
  const int raw = a.release();
  EXPECT_FALSE(a.valid());
  EXPECT_TRUE(is_open(raw));
  a.reset(raw);
  a.reset();
  EXPECT_FALSE(is_open(raw));
}

TEST(Notifier, AnyNumberOfRingsIsOneEventUntilDrained) {
  Notifier notifier;
  EXPECT_FALSE(readable(notifier.fd()));
  for (int i = 0; i < 100; ++i) notifier.ring();
  EXPECT_TRUE(readable(notifier.fd()));
  notifier.drain();
  EXPECT_FALSE(readable(notifier.fd()));
  notifier.ring();
  EXPECT_TRUE(readable(notifier.fd()));
}

TEST(Notifier, NoEventIsLostBetweenAProducerAndASleeper) {
  Notifier notifier;
  std::atomic<int> produced{0};
  constexpr int kEvents = 20'000;
  std::thread producer([&] {
    for (int i = 0; i < kEvents; ++i) {
      produced.fetch_add(1);
      notifier.ring();
    }
  });
  int seen = 0;
  const int64_t deadline = testing::in_seconds(20);
  while (seen < kEvents && now_ns() < deadline) {
    pollfd ready{notifier.fd(), POLLIN, 0};
    ASSERT_GT(poll(&ready, 1, 5000), 0) << "slept through an event after " << seen;
    notifier.drain();  // before looking
    seen = produced.load();
  }
  producer.join();
  EXPECT_EQ(seen, kEvents);
}

TEST(Futex, ReturnsAtOnceWhenTheWordHasChanged) {
  const std::atomic<uint32_t> word{5};
  const int64_t begin = now_ns();
  futex_wait(word, 4, testing::in_seconds(5));
  EXPECT_LT(now_ns() - begin, 1'000'000'000);
}

TEST(Futex, EndsAtItsAbsoluteDeadline) {
  const std::atomic<uint32_t> word{5};
  const int64_t deadline = now_ns() + 20'000'000;
  while (now_ns() < deadline) futex_wait(word, 5, deadline);
  EXPECT_LT(now_ns(), deadline + 2'000'000'000);
}

TEST(Futex, WakesASleeperWithoutADeadline) {
  std::atomic<uint32_t> word{0};
  std::thread sleeper([&] {
    while (word.load() == 0) futex_wait(word, 0, kNoDeadline);
  });
  word.store(1);
  while (true) {
    futex_wake_all(word);
    if (word.load() == 1) break;
  }
  futex_wake_all(word);
  sleeper.join();
}

TEST(Clock, NeverGoesBack) {
  int64_t last = now_ns();
  for (int i = 0; i < 10'000; ++i) {
    const int64_t now = now_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace kvtransfer
