// The same suite on both twins.
#include "kvtransfer/io_queue.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <thread>

#include "base/fd.h"
#include "base/notifier.h"
#include "io/io_slots.h"
#include "kvtransfer/error.h"
#include "kvtransfer/memory_region.h"
#include "test_support.h"

namespace kvtransfer {
namespace {

using testing::TemporaryDirectory;

class IoQueueTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  std::unique_ptr<IoQueue> make(uint32_t depth = 16) {
    const IoBuffer buffer{region_.data(), region_.bytes()};
    return IoQueue::create({.backend = GetParam(), .depth = depth}, {&buffer, 1});
  }

  // Completions until nothing is in flight.
  static std::map<uint64_t, int64_t> finish(IoQueue& queue) {
    std::map<uint64_t, int64_t> results;
    queue.submit();
    const int64_t deadline = testing::in_seconds(10);
    while (queue.in_flight() > 0 && now_ns() < deadline) {
      IoCompletion out[4];
      const size_t n = queue.poll(out);
      for (size_t i = 0; i < n; ++i) results[out[i].user_data] = out[i].result;
      if (n == 0) {
        const int64_t until = testing::in_seconds(5);
        queue.wait({}, until);
        EXPECT_LT(now_ns(), until) << "completion without an event";
      }
    }
    EXPECT_EQ(queue.in_flight(), 0u);
    return results;
  }

  int64_t run(IoQueue& queue, IoRequest request) {
    request.user_data = 1;
    EXPECT_TRUE(queue.prepare(request));
    return finish(queue)[1];
  }

  std::string write_file(size_t bytes) {
    const std::string path = directory_.path() + "/file";
    std::string data(bytes, '\0');
    testing::fill_random(reinterpret_cast<uint8_t*>(data.data()), bytes, 3);
    std::ofstream(path, std::ios::binary) << data;
    return path;
  }

  MemoryRegion region_{1 << 20, RegionKind::kAnonymous, HugePages::kOff};
  TemporaryDirectory directory_;
};

TEST_P(IoQueueTest, ReadsExactlyTheBytesOfTheFileWithDirectIo) {
  const auto queue = make();
  const std::string path = write_file(256 << 10);
  const int64_t fd =
      run(*queue, {.op = IoOp::kOpen, .flags = O_RDONLY | O_DIRECT, .path = path.c_str()});
  ASSERT_GE(fd, 0);
  const Fd owner(static_cast<int>(fd));
  for (uint64_t i = 0; i < 16; ++i) {
    ASSERT_TRUE(queue->prepare({.fd = owner.get(),
                                .buffer = region_.data() + (15 - i) * 16384,
                                .offset = i * 16384,
                                .length = 16384,
                                .user_data = i}));
  }
  EXPECT_FALSE(queue->prepare({.fd = owner.get(), .buffer = region_.data(), .length = 4096}));
  const auto results = finish(*queue);
  ASSERT_EQ(results.size(), 16u);
  for (const auto& [id, result] : results) EXPECT_EQ(result, 16384) << id;
  std::ifstream file(path, std::ios::binary);
  std::vector<char> wanted(16384);
  for (uint64_t i = 0; i < 16; ++i) {
    file.read(wanted.data(), 16384);
    EXPECT_EQ(memcmp(region_.data() + (15 - i) * 16384, wanted.data(), 16384), 0) << i;
  }
}

TEST_P(IoQueueTest, AReadBeyondTheEndIsNoSuccess) {
  const auto queue = make();
  const Fd fd(open(write_file(10'000).c_str(), O_RDONLY));
  EXPECT_EQ(run(*queue, {.fd = fd.get(), .buffer = region_.data(), .offset = 0, .length = 16384}),
            -ENODATA);
  EXPECT_EQ(run(*queue, {.fd = fd.get(), .buffer = region_.data(), .offset = 20'000, .length = 1}),
            -ENODATA);
}

TEST(IoSlots, AShortReadIsContinuedUntilTheLengthIsThere) {
  IoSlot slot;
  slot.request = {.op = IoOp::kRead, .length = 100};
  EXPECT_FALSE(advance(slot, 40).finished);
  EXPECT_FALSE(advance(slot, -EINTR).finished);
  EXPECT_FALSE(advance(slot, -EAGAIN).finished);
  const IoStep last = advance(slot, 60);
  EXPECT_TRUE(last.finished);
  EXPECT_EQ(last.result, 100);
  slot = {};
  slot.request = {.op = IoOp::kWrite, .length = 100};
  EXPECT_EQ(advance(slot, 0).result, -EIO);
}

TEST_P(IoQueueTest, WritesSyncsAndRenamesWithoutReplacing) {
  const auto queue = make();
  const std::string path = directory_.path() + "/new", target = directory_.path() + "/done";
  const int64_t fd =
      run(*queue, {.op = IoOp::kOpen, .flags = O_CREAT | O_EXCL | O_WRONLY, .path = path.c_str()});
  ASSERT_GE(fd, 0);
  const Fd owner(static_cast<int>(fd));
  testing::fill_random(region_.data(), 12288, 9);
  EXPECT_EQ(run(*queue,
                {.op = IoOp::kWrite, .fd = owner.get(), .buffer = region_.data(), .length = 12288}),
            12288);
  EXPECT_EQ(run(*queue, {.op = IoOp::kSync, .fd = owner.get()}), 0);
  const IoRequest rename{.op = IoOp::kRename,
                         .flags = RENAME_NOREPLACE,
                         .path = path.c_str(),
                         .new_path = target.c_str()};
  EXPECT_EQ(run(*queue, rename), 0);
  std::ofstream(path) << "x";
  EXPECT_EQ(run(*queue, rename), -EEXIST);
  EXPECT_EQ(std::filesystem::file_size(target), 12288u);
}

TEST_P(IoQueueTest, ErrorsCarryTheErrno) {
  const auto queue = make();
  EXPECT_EQ(run(*queue, {.op = IoOp::kOpen, .flags = O_RDONLY, .path = "/nonexistent/x"}), -ENOENT);
  EXPECT_EQ(run(*queue, {.fd = 9999, .buffer = region_.data(), .length = 4096}), -EBADF);
}

TEST_P(IoQueueTest, TheDestructorWaitsForWhatIsInFlight) {
  const std::string path = write_file(1 << 20);
  const Fd fd(open(path.c_str(), O_RDONLY | O_DIRECT));
  for (int round = 0; round < 20; ++round) {
    const auto queue = make();
    for (uint64_t i = 0; i < 16; ++i) {
      queue->prepare({.fd = fd.get(),
                      .buffer = region_.data() + i * 65536,
                      .offset = i * 65536,
                      .length = 65536,
                      .user_data = i});
    }
    queue->submit();
  }  // AddressSanitizer or a torn buffer would tell
}

TEST_P(IoQueueTest, MakesDirectoriesRemovesFilesAndClosesDescriptors) {
  const auto queue = make();
  const std::string folder = directory_.path() + "/folder", path = write_file(10);
  EXPECT_EQ(run(*queue, {.op = IoOp::kMakeDirectory, .path = folder.c_str()}), 0);
  EXPECT_EQ(run(*queue, {.op = IoOp::kMakeDirectory, .path = folder.c_str()}), -EEXIST);
  EXPECT_TRUE(std::filesystem::is_directory(folder));
  const int fd = open(path.c_str(), O_RDONLY);
  EXPECT_EQ(run(*queue, {.op = IoOp::kUnlink, .path = path.c_str()}), 0);
  EXPECT_EQ(run(*queue, {.op = IoOp::kUnlink, .path = path.c_str()}), -ENOENT);
  EXPECT_EQ(run(*queue, {.op = IoOp::kClose, .fd = fd}), 0);
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

// With one descriptor, with several, and with one after several: each is watched differently.
TEST_P(IoQueueTest, WaitingEndsWhenADescriptorIsReadableOrTheDeadlinePasses) {
  const auto queue = make();
  Notifier bell, other;
  const std::vector<std::vector<int>> sets = {
      {bell.fd()}, {bell.fd(), other.fd()}, {bell.fd()}, {other.fd()}, {other.fd(), bell.fd()}};
  for (const auto& fds : sets) {
    for (int round = 0; round < 3; ++round) {
      std::thread ringer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        (fds[0] == bell.fd() ? bell : other).ring();
      });
      const int64_t late = testing::in_seconds(5);
      IoCompletion none[1];
      pollfd rung{fds[0], POLLIN, 0};
      while (poll(&rung, 1, 0) == 0 && now_ns() < late) {
        queue->wait(fds, late);
        EXPECT_EQ(queue->poll(none), 0u);
      }
      EXPECT_LT(now_ns(), late);
      ringer.join();
      bell.drain();
      other.drain();
    }
  }
  const int64_t soon = testing::in_seconds(0.02);
  while (now_ns() < soon) queue->wait({}, soon);
}

INSTANTIATE_TEST_SUITE_P(Twins, IoQueueTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                         [](const auto& info) {
                           return info.param == IoBackend::kUring ? "uring" : "threads";
                         });

TEST(IoQueue, RegistersItsBuffersWhenTheKernelLetsIt) {
  MemoryRegion region(1 << 20, RegionKind::kAnonymous, HugePages::kOff);
  const IoBuffer buffer{region.data(), region.bytes()};
  const auto queue = IoQueue::create({.backend = IoBackend::kUring}, {&buffer, 1});
  EXPECT_EQ(queue->buffers_registered(), queue->fallback_reason().empty());
}

TEST(IoQueue, RefusesAbsurdOptions) {
  EXPECT_THROW(IoQueue::create({.depth = 0}), Error);
  EXPECT_THROW(IoQueue::create({.depth = 1 << 20}), Error);
  EXPECT_THROW(IoQueue::create({.num_threads = 0}), Error);
}

TEST(IoSlots, ACompletionOfAnEarlierLifeIsRecognised) {
  IoSlots slots(2);
  const uint32_t first = slots.claim({});
  const uint64_t stale = slots.tag(first);
  slots.release(first);
  EXPECT_EQ(slots.find(stale), nullptr);
  const uint32_t second = slots.claim({});
  ASSERT_EQ(second, first);
  EXPECT_EQ(slots.find(stale), nullptr);
  EXPECT_NE(slots.find(slots.tag(second)), nullptr);
  EXPECT_EQ(slots.find(~uint64_t{0}), nullptr);
}

// Makes io_uring_setup fail with EPERM, as container runtimes do.
void deny_io_uring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{4, filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

TEST(IoQueue, FallsBackToThreadsAndSaysWhyWhenIoUringIsDenied) {
  const pid_t child = fork();
  if (child == 0) {
    deny_io_uring();
    int code = 0;
    {
      const auto queue = IoQueue::create({.backend = IoBackend::kAuto});
      if (queue->backend() != "threads") code |= 1;
      if (queue->fallback_reason().find("seccomp") == std::string::npos) code |= 2;
    }
    try {
      IoQueue::create({.backend = IoBackend::kUring});
      code |= 4;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnsupported) code |= 8;
    }
    _exit(code);
  }
  int status;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace kvtransfer
