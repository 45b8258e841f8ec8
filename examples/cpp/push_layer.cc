// Two processes: the parent pushes a paged KV-cache layer by layer into the child's buffer; the
// child checks every byte as the layers arrive.
#include <kvtransfer/traffic_manager.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <string>

using namespace kvtransfer;

namespace {

constexpr uint32_t kLayers = 8, kPages = 4, kPageTokens = 16, kBytes = 256, kTokens = 64;
const BlockLayout kLayout(kLayers, kTokens, {kBytes});
constexpr uint32_t kHeader = 4096;

int64_t in_seconds(int seconds) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec + seconds) * 1'000'000'000LL;
}

std::shared_ptr<BufferPool> make_pool() {
  const auto bytes = BufferPool::slot_bytes(kHeader, kLayout.full_block_bytes());
  return std::make_shared<BufferPool>(
      std::make_shared<MemoryRegion>(4 * bytes, RegionKind::kShared), kHeader,
      kLayout.full_block_bytes());
}

int receive(const std::string& name, int ready_fd) {
  TrafficOptions options;
  options.name = options.listen = name;
  const auto pool = make_pool();
  TrafficManager manager(nullptr, pool, nullptr, kLayout, options);
  const auto arrived = manager.make_stream(1);
  const uint32_t tag = manager.open_receive(arrived);
  if (write(ready_fd, &tag, sizeof tag) != sizeof tag) return 1;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (arrived->wait(layer, in_seconds(10)) != WaitResult::kReady) return 2;
    const uint8_t* at =
        pool->region()->data() + pool->payload_offset(0) + kLayout.layer_offset(layer);
    for (uint64_t i = 0; i < kLayout.layer_bytes(layer); ++i) {
      if (at[i] != layer + 1) return 3;
    }
    std::printf("layer %u arrived: %lu bytes as sent\n", layer, kLayout.layer_bytes(layer));
  }
  return 0;
}

}  // namespace

int main() {
  const std::string name = "kvtransfer-example-" + std::to_string(getpid());
  int ready[2];
  if (pipe(ready) != 0) return 1;
  const pid_t child = fork();
  if (child == 0) {
    const int code = receive(name, ready[1]);
    std::fflush(stdout);
    _exit(code);
  }
  uint32_t tag;
  if (read(ready[0], &tag, sizeof tag) != sizeof tag) return 1;

  constexpr uint64_t kLayerBytes = uint64_t{kPages} * kPageTokens * kBytes;
  auto device = std::make_shared<MemoryRegion>(kLayers * kLayerBytes, RegionKind::kShared);
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < kLayers; ++l) {
    layers.push_back({l * kLayerBytes, kPageTokens * kBytes, {{0, kBytes, kBytes}}});
    std::fill_n(device->data() + l * kLayerBytes, kLayerBytes, static_cast<uint8_t>(l + 1));
  }
  TrafficOptions options;
  options.name = "sender";
  options.listen = name + "-sender";
  const auto pool = make_pool();
  TrafficManager manager(nullptr, pool, device, kLayout, options);
  const auto computed = manager.make_stream(1);
  MoveSpec push;
  push.cache = std::make_shared<PagedCache>(device->bytes(), kPageTokens, kPages, layers);
  push.pages = {0, 1, 2, 3};
  push.block_starts = {pool->payload_offset(0)};  // the child's pool has the same shape
  push.num_tokens = kTokens;
  push.after = computed;
  push.peer = manager.connect(name, in_seconds(10));
  push.tag = tag;
  const auto ticket = manager.push(push);
  for (uint32_t l = 0; l < kLayers; ++l) computed->publish(l);  // as each layer is computed
  int status = 1;
  waitpid(child, &status, 0);
  ticket->wait(in_seconds(10));
  std::printf("%s\n", status == 0 && ticket->outcome().ok() ? "ok" : "FAILED");
  return status == 0 && ticket->outcome().ok() ? 0 : 1;
}
