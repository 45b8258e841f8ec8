// How to read many whole files with io_uring: open, read and close as operations of their own; the
// three linked on a direct descriptor; descriptors that are kept open (docs/decisions/0009).
//
//   g++ -O2 -std=c++20 -Isrc bench/bench_open.cc -o build/bench_open -luring
//   build/bench_open FOLDER BYTES FILES DEPTH ROUNDS
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"

namespace {

enum class Way { kOperations, kLinked, kKeptOpen };
enum Step : uint64_t { kOpen, kRead, kClose, kLinkedOpen };

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

class Bench {
 public:
  Bench(const std::string& folder, size_t bytes, int files, unsigned depth)
      : bytes_(bytes), depth_(depth) {
    memory_ = static_cast<char*>(mmap(nullptr, bytes * depth, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    for (int i = 0; i < files; ++i) {
      paths_.push_back(folder + "/bench-open-" + std::to_string(i));
      const int fd = open(paths_.back().c_str(), O_RDWR | O_CREAT | O_DIRECT, 0644);
      if (pwrite(fd, memory_, bytes, 0) != static_cast<ssize_t>(bytes)) std::abort();
      kept_.push_back(fd);
    }
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    const iovec buffer{memory_, bytes * depth};
    if (io_uring_queue_init_params(depth * 4, &ring_, &params) != 0 ||
        io_uring_register_buffers(&ring_, &buffer, 1) != 0 ||
        io_uring_register_files_sparse(&ring_, depth) != 0) {
      std::abort();
    }
  }
  ~Bench() {
    for (const std::string& path : paths_) unlink(path.c_str());
  }

  // Reads every file once, in random order.
  void run(Way way) {
    way_ = way;
    order_.resize(paths_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = i;
    std::shuffle(order_.begin(), order_.end(), random_);
    free_.clear();
    for (unsigned i = 0; i < depth_; ++i) free_.push_back(i);
    descriptors_.assign(depth_, -1);
    for (done_ = 0, next_ = 0; done_ < order_.size();) {
      while (!free_.empty() && next_ < order_.size()) start();
      io_uring_submit_and_wait(&ring_, 1);
      io_uring_cqe* completion;
      while (io_uring_peek_cqe(&ring_, &completion) == 0) {
        const uint64_t tag = completion->user_data;
        const int result = completion->res;
        io_uring_cqe_seen(&ring_, completion);
        finish(static_cast<Step>(tag >> 32), static_cast<unsigned>(tag), result);
      }
    }
  }

 private:
  void prepare_read(int fd, unsigned slot, unsigned flags) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_read_fixed(sqe, fd, memory_ + bytes_ * slot, static_cast<unsigned>(bytes_), 0, 0);
    sqe->flags |= flags;
    io_uring_sqe_set_data64(sqe, uint64_t{kRead} << 32 | slot);
  }

  void start() {
    const unsigned slot = free_.back();
    free_.pop_back();
    const size_t file = order_[next_++];
    if (way_ == Way::kKeptOpen) return prepare_read(kept_[file], slot, 0);
    const char* path = paths_[file].c_str();
    if (way_ == Way::kOperations) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      io_uring_prep_openat(sqe, AT_FDCWD, path, O_RDONLY | O_DIRECT | O_CLOEXEC, 0);
      io_uring_sqe_set_data64(sqe, uint64_t{kOpen} << 32 | slot);
      return;
    }
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_openat_direct(sqe, AT_FDCWD, path, O_RDONLY | O_DIRECT, 0, slot);
    sqe->flags |= IOSQE_IO_LINK | IOSQE_CQE_SKIP_SUCCESS;
    io_uring_sqe_set_data64(sqe, uint64_t{kLinkedOpen} << 32 | slot);
    prepare_read(static_cast<int>(slot), slot, IOSQE_FIXED_FILE | IOSQE_IO_LINK);
    sqe = io_uring_get_sqe(&ring_);
    io_uring_prep_close_direct(sqe, slot);
    io_uring_sqe_set_data64(sqe, uint64_t{kClose} << 32 | slot);
  }

  void finish(Step step, unsigned slot, int result) {
    if (result < 0 || (step == kRead && result != static_cast<int>(bytes_))) {
      std::fprintf(stderr, "step %d: %d\n", static_cast<int>(step), result);
      std::abort();
    }
    if (step == kOpen) {
      descriptors_[slot] = result;
      return prepare_read(result, slot, 0);
    }
    if (step == kRead && way_ == Way::kOperations) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      io_uring_prep_close(sqe, descriptors_[slot]);
      io_uring_sqe_set_data64(sqe, uint64_t{kClose} << 32 | slot);
      return;
    }
    if (step == kRead && way_ == Way::kLinked) return;  // its close frees the descriptor's slot
    free_.push_back(slot);
    ++done_;
  }

  const size_t bytes_;
  const unsigned depth_;
  char* memory_;
  io_uring ring_;
  std::vector<std::string> paths_;
  std::vector<int> kept_;
  std::mt19937 random_{1};
  Way way_{};
  std::vector<size_t> order_;
  std::vector<unsigned> free_;
  std::vector<int> descriptors_;
  size_t next_ = 0, done_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: bench_open FOLDER BYTES FILES DEPTH ROUNDS\n");
    return 2;
  }
  const size_t bytes = std::strtoul(argv[2], nullptr, 10);
  const int files = std::atoi(argv[3]);
  Bench bench(argv[1], bytes, files, static_cast<unsigned>(std::atoi(argv[4])));
  const double total = static_cast<double>(bytes) * files;
  std::map<std::string, std::vector<std::pair<double, double>>> found;
  for (int round = 0; round < std::atoi(argv[5]); ++round) {
    for (const auto& [way, name] : {std::pair{Way::kOperations, "operations"},
                                    {Way::kLinked, "linked"},
                                    {Way::kKeptOpen, "kept open"}}) {
      const double cpu = cpu_seconds();
      const int64_t begin = kvtransfer::now_ns();
      bench.run(way);
      const double seconds = static_cast<double>(kvtransfer::now_ns() - begin) * 1e-9;
      found[name].emplace_back(total / seconds / 1e9, (cpu_seconds() - cpu) / (total / 1e9));
    }
  }
  for (auto& [name, values] : found) {
    std::sort(values.begin(), values.end());
    const auto& [speed, cpu] = values[values.size() / 2];
    std::printf("%-12s %.2f GB/s (%.2f-%.2f), %.3f CPU s/GB\n", name.c_str(), speed,
                values.front().first, values.back().first, cpu);
  }
}
