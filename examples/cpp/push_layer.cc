// Two processes: the parent pushes a paged KV-cache layer by layer into the child's buffer, over
// `push_layer shm` or `push_layer verbs`; the child checks every byte as the layers arrive.
#include <kvtransfer/traffic_manager.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <string>

using namespace kvtransfer;

constexpr uint32_t kLayers = 8, kPages = 4, kPageTokens = 16, kBytes = 256, kTokens = 64;
constexpr uint64_t kLayerBytes = uint64_t{kPages} * kPageTokens * kBytes;
const BlockLayout kLayout(kLayers, kTokens, {kBytes});

static int64_t in_seconds(int seconds) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (now.tv_sec + seconds) * 1'000'000'000LL;
}

struct Engine {
  Engine(const std::string& name, const std::string& transport,
         std::shared_ptr<MemoryRegion> device = nullptr) {
    const auto slot = BufferPool::slot_bytes(4096, kLayout.full_block_bytes());
    pool =
        std::make_shared<BufferPool>(std::make_shared<MemoryRegion>(4 * slot, RegionKind::kShared),
                                     4096, kLayout.full_block_bytes());
    TrafficOptions options;
    options.name = options.listen = name;
    options.transport = transport == "verbs" ? Transport::kVerbs : Transport::kShm;
    manager = std::make_unique<TrafficManager>(nullptr, pool, device, kLayout, options);
  }
  std::shared_ptr<BufferPool> pool;
  std::unique_ptr<TrafficManager> manager;
};

static int receive(Engine engine, int ready_fd) {
  const auto arrived = engine.manager->make_stream(1);
  const uint32_t tag = engine.manager->open_receive(arrived);
  if (write(ready_fd, &tag, sizeof tag) != sizeof tag) return 1;
  const uint8_t* block = engine.pool->region()->data() + engine.pool->payload_offset(0);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (arrived->wait(layer, in_seconds(10)) != WaitResult::kReady) return 2;
    for (uint64_t i = 0; i < kLayerBytes; ++i) {
      if (block[kLayout.layer_offset(layer) + i] != layer + 1) return 3;
    }
  }
  return 0;
}

int main(int argc, char** argv) try {
  const std::string transport = argc > 1 ? argv[1] : "shm";
  const std::string name = "kvtransfer-example-" + std::to_string(getpid());
  int ready[2];
  if (pipe(ready) != 0) return 1;
  const pid_t child = fork();
  if (child == 0) _exit(receive(Engine(name, transport), ready[1]));
  auto device = std::make_shared<MemoryRegion>(kLayers * kLayerBytes, RegionKind::kShared);
  std::vector<CacheLayer> layers;
  for (uint32_t l = 0; l < kLayers; ++l) {
    layers.push_back({l * kLayerBytes, kPageTokens * kBytes, {{0, kBytes, kBytes}}});
    std::fill_n(device->data() + l * kLayerBytes, kLayerBytes, static_cast<uint8_t>(l + 1));
  }
  const Engine engine(name + "-sender", transport, device);
  MoveSpec push;
  push.cache = std::make_shared<PagedCache>(device->bytes(), kPageTokens, kPages, layers);
  push.pages = {2, 0, 3, 1};
  push.block_starts = {engine.pool->payload_offset(0)};  // the child's pool has the same shape
  push.num_tokens = kTokens;
  push.after = engine.manager->make_stream(1);
  push.peer = engine.manager->connect(name, in_seconds(10));
  if (read(ready[0], &push.tag, sizeof push.tag) != sizeof push.tag) return 1;
  const auto ticket = engine.manager->push(push);
  for (uint32_t l = 0; l < kLayers; ++l) push.after->publish(l);  // as each layer is computed
  int status = 1;
  const bool sent = ticket->wait(in_seconds(10)) && ticket->outcome().ok();
  waitpid(child, &status, 0);
  std::printf("%s: %s\n", transport.c_str(), status == 0 && sent ? "ok" : "FAILED");
  return status == 0 && sent ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
