#include "store/directory_scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/fd.h"
#include "store/block_file.h"

namespace kvtransfer {

namespace {

constexpr size_t kKeyHex = 64;
constexpr size_t kNameBytes = 2 * kKeyHex + 1 + 4;
constexpr unsigned kThreads = 32;  // waiting for the device, most of the time

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool is_fan_out(std::string_view name) {
  return name.size() == 2 && digit_of(name[0]) >= 0 && digit_of(name[1]) >= 0;
}

uint64_t file_time_ns(const struct stat& info) {
  return static_cast<uint64_t>(info.st_mtim.tv_sec) * 1'000'000'000u +
         static_cast<uint64_t>(info.st_mtim.tv_nsec);
}

// Calls `visit(directory descriptor, entry)` with every entry of a directory; none if unreadable.
template <typename Visit>
void each_entry(int parent, const char* name, Visit visit) {
  const int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  DIR* directory = fdopendir(fd);
  if (directory == nullptr) {
    close(fd);
    return;
  }
  while (const dirent* entry = readdir(directory)) {
    visit(fd, *entry);
  }
  closedir(directory);
}

// Not time(): that clock may lie behind the one that dates files.
int64_t seconds_now() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec;
}

class Scanner {
 public:
  Scanner(uint64_t file_bytes, uint32_t stale_seconds, ScanDetail detail)
      : file_bytes_(file_bytes), stale_before_(seconds_now() - stale_seconds), detail_(detail) {}

  void look_at(int directory, const dirent& entry) {
    const char* name = entry.d_name;
    const std::string_view view(name);
    const bool temporary = view.starts_with(kTemporaryPrefix);
    const auto id = temporary ? std::nullopt : id_from_name(view);
    if (id && detail_ == ScanDetail::kNames && entry.d_type == DT_REG) {
      found.blocks.emplace_back(*id, 0);
      return;
    }
    struct stat info;
    if ((!temporary && !id) || fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode)) {
      return;
    }
    if (!temporary && static_cast<uint64_t>(info.st_size) == file_bytes_) {
      found.blocks.emplace_back(*id, file_time_ns(info));
      return;
    }
    // A dead writer's temporary, or what a loss of power has left of a block.
    const bool stale = info.st_mtim.tv_sec <= stale_before_;
    if (stale && unlinkat(directory, name, 0) == 0) ++found.swept_temporaries;
  }
  void look_below(int parent, const char* name) {
    each_entry(parent, name, [this](int directory, const dirent& inner) {
      if (!is_fan_out(inner.d_name)) return;
      each_entry(directory, inner.d_name,
                 [this](int leaf, const dirent& file) { look_at(leaf, file); });
    });
  }

  DirectoryScan found;

 private:
  const uint64_t file_bytes_;
  const int64_t stale_before_;
  const ScanDetail detail_;
};

}  // namespace

std::optional<BlockKey> key_from_hex(std::string_view hex) {
  BlockKey key;
  if (hex.size() != kKeyHex) return std::nullopt;
  for (size_t i = 0; i < key.size(); ++i) {
    const int high = digit_of(hex[2 * i]), low = digit_of(hex[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    key[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return key;
}

std::string block_name(const BlockId& id) {
  return to_hex(id.key) + "-" + to_hex(id.parent) + ".kvb";
}

std::optional<BlockId> id_from_name(std::string_view name) {
  if (name.size() != kNameBytes || name[kKeyHex] != '-' || !name.ends_with(".kvb")) {
    return std::nullopt;
  }
  const auto key = key_from_hex(name.substr(0, kKeyHex));
  const auto parent = key_from_hex(name.substr(kKeyHex + 1, kKeyHex));
  if (!key || !parent) return std::nullopt;
  return BlockId{*key, *parent};
}

DirectoryScan scan_directory(const std::string& root, uint64_t file_bytes, uint32_t stale_seconds,
                             ScanDetail detail) {
  Scanner top(file_bytes, stale_seconds, detail);
  std::vector<std::string> folders;
  each_entry(AT_FDCWD, root.c_str(), [&](int directory, const dirent& entry) {
    if (is_fan_out(entry.d_name)) {
      folders.emplace_back(entry.d_name);
    } else {
      top.look_at(directory, entry);
    }
  });
  const Fd root_fd(open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto count =
      static_cast<unsigned>(std::min<size_t>(kThreads, std::max<size_t>(folders.size() / 8, 1)));
  std::vector<Scanner> scanners(count, Scanner(file_bytes, stale_seconds, detail));
  std::atomic<size_t> next{0};
  const auto work = [&](Scanner& scanner) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < folders.size();) {
      scanner.look_below(root_fd.get(), folders[i].c_str());
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(work, std::ref(scanners[i]));
  work(scanners[0]);
  for (std::thread& thread : threads) thread.join();
  DirectoryScan all = std::move(top.found);
  for (Scanner& scanner : scanners) {
    all.swept_temporaries += scanner.found.swept_temporaries;
    all.blocks.insert(all.blocks.end(), scanner.found.blocks.begin(), scanner.found.blocks.end());
  }
  return all;
}

}  // namespace kvtransfer
