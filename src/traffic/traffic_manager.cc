#include "kvtransfer/traffic_manager.h"

#include <errno.h>
#include <sys/prctl.h>
#include <time.h>

#include <list>
#include <thread>

#include "base/adaptive_spin.h"
#include "base/bounded_queue.h"
#include "traffic/operation.h"
#include "traffic/submission.h"
#include "transport/peer_listener.h"

namespace kvtransfer {

bool Ticket::wait(int64_t deadline_ns) const noexcept {
  while (!done()) {
    if (now_ns() >= deadline_ns) return false;
    futex_wait(done_, 0, deadline_ns);
  }
  return true;
}

void Ticket::cancel() noexcept {
  cancelled_.store(true, std::memory_order_release);
  if (wake_) wake_->ring();
}

struct TrafficManager::State {
  State(std::shared_ptr<BlockStore> store_in, std::shared_ptr<BufferPool> pool_in,
        std::shared_ptr<MemoryRegion> device_in, const BlockLayout& layout_in,
        const TrafficOptions& options);
  ~State();

  std::shared_ptr<Ticket> submit(std::unique_ptr<Operation> operation);
  void open_transport(const TrafficOptions& options);

  void run() noexcept;
  bool take_commands() noexcept;
  bool step_operations() noexcept;
  bool step_operations(bool background) noexcept;
  bool ring_doorbells() noexcept;
  void sleep() noexcept;
  void stop_all() noexcept;

  std::shared_ptr<BlockStore> store;
  std::shared_ptr<BufferPool> pool;
  std::shared_ptr<MemoryRegion> device;
  const BlockLayout layout;
  std::shared_ptr<Notifier> wake = std::make_shared<Notifier>();    // to the progress thread
  std::shared_ptr<Notifier> events = std::make_shared<Notifier>();  // to the engine
  TrafficStats stats;
  std::array<TokenBucket, kNumTrafficKinds> buckets;
  Peers peers;
  std::shared_ptr<VerbsDomain> domain;
  std::unique_ptr<PeerListener> listener;
  std::unique_ptr<IoQueue> io;
  std::unique_ptr<StoreIo> store_io;
  BoundedQueue<std::unique_ptr<Operation>> commands{4096};
  std::atomic<bool> stopping{false};

  // Progress thread only.
  Progress progress;
  std::list<std::unique_ptr<Operation>> operations;  // in order of submission
  AdaptiveSpin spin;
  std::vector<int> event_fds;
  std::thread thread;
};

TrafficManager::State::State(std::shared_ptr<BlockStore> store_in,
                             std::shared_ptr<BufferPool> pool_in,
                             std::shared_ptr<MemoryRegion> device_in, const BlockLayout& layout_in,
                             const TrafficOptions& options)
    : store(std::move(store_in)),
      pool(std::move(pool_in)),
      device(std::move(device_in)),
      layout(layout_in),
      stats(options.trace),
      spin(static_cast<int64_t>(options.spin_us) * 1000) {
  if (!pool) throw Error(ErrorCode::kInvalidArgument, "TrafficManager: needs a pool");
  if (store && !(store->layout() == layout)) {
    throw Error(ErrorCode::kMismatch, "TrafficManager: the store's layout is " +
                                          store->layout().to_string() + ", ours " +
                                          layout.to_string());
  }
  for (size_t i = 0; i < kNumTrafficKinds; ++i) buckets[i].set_rate(options.bytes_per_second[i]);
  const IoBuffer buffer{pool->region()->data(), pool->region()->bytes()};
  io = IoQueue::create(store ? suited_to(*store, options.io) : options.io,
                       {&buffer, store ? 1u : 0u});
  if (store) store_io = std::make_unique<StoreIo>(*store, *io, *pool, options.memory_blocks);
  open_transport(options);
  progress.store_io = store_io.get();
  progress.pool = pool.get();
  progress.device = device.get();
  progress.layout = &layout;
  progress.peers = &peers;
  progress.stats = &stats;
  progress.buckets = &buckets;
  thread = std::thread([this] { run(); });
}

// Region 0 is the pool, which peers may reach; region 1 the device cache, which only we do. A copy
// through the NIC writes into the device cache like a peer, so then it is registered as reachable;
// its key is told to nobody.
void TrafficManager::State::open_transport(const TrafficOptions& options) {
  std::vector<std::shared_ptr<MemoryRegion>> regions = {pool->region()};
  if (device) regions.push_back(device);
  auto ring_bell = [notifier = wake] { notifier->ring(); };
  if (options.transport == Transport::kVerbs) {
    const bool nic_copy = options.copy == CopyBackend::kNic && device != nullptr;
    domain = VerbsDomain::open(options.verbs, regions, 1, nic_copy);
    if (nic_copy) {
      PeerLinks loopback;
      loopback.push_back(domain->make_loopback());
      progress.copy_peer = peers.add(std::move(loopback));
    }
    if (options.listen.empty()) return;
    listener = make_verbs_listener(options.listen, domain, options.name, options.epoch, ring_bell);
    return;
  }
  if (options.copy == CopyBackend::kNic) {
    throw Error(ErrorCode::kInvalidArgument, "TrafficManager: copies through the NIC need verbs");
  }
  if (options.listen.empty()) return;
  listener = make_shm_listener(options.listen, {options.name, options.epoch, {pool->region()}},
                               std::move(regions), ring_bell);
}

TrafficManager::State::~State() {
  stopping.store(true, std::memory_order_release);
  wake->ring();
  thread.join();
}

std::shared_ptr<Ticket> TrafficManager::State::submit(std::unique_ptr<Operation> operation) {
  auto ticket = operation->ticket();
  operation->begin(*pool, wake);
  if (!commands.push(operation)) {
    operation->drop(*pool);
    throw Error(ErrorCode::kExhausted, "TrafficManager: 4096 operations wait already");
  }
  wake->ring();
  return ticket;
}

// The progress loop: everything that can move, moves; then sleep until something can.
void TrafficManager::State::run() noexcept {
  prctl(PR_SET_NAME, "kvt-progress");
  bool looked_on = false;
  for (;;) {
    wake->drain();  // before looking at anything that is rung for, `stopping` included
    if (stopping.load(std::memory_order_acquire)) break;
    progress.now_ns = now_ns();
    progress.wake_at_ns = kNoDeadline;
    bool moved = take_commands();
    if (listener) {
      for (auto& links : listener->take_accepted()) peers.add(std::move(links));
    }
    if (store_io) moved |= store_io->poll() > 0;
    moved |= peers.poll();
    moved |= step_operations();
    moved |= ring_doorbells();
    const bool look_on =
        moved || (peers.has_work_in_flight() && spin.keep_looking(progress.now_ns));
    if (!look_on) {
      sleep();  // submits, too: one system call for both
      spin.slept(now_ns() - progress.now_ns);
    } else if (looked_on) {
      io->submit();
    }
    if (moved) spin.found();
    looked_on = look_on;
  }
  stop_all();
}

bool TrafficManager::State::take_commands() noexcept {
  bool any = false;
  for (std::unique_ptr<Operation> operation; commands.pop(operation); any = true) {
    operations.push_back(std::move(operation));
  }
  return any;
}

bool TrafficManager::State::step_operations() noexcept {
  const bool moved = step_operations(false);
  return step_operations(true) || moved;
}

bool TrafficManager::State::step_operations(bool background) noexcept {
  bool moved = false;
  for (auto it = operations.begin(); it != operations.end();) {
    Operation& operation = **it;
    if (operation.background() != background) {
      ++it;
      continue;
    }
    operation.check_limits(progress);
    moved |= operation.step(progress);
    if (operation.finished()) {
      operation.end(progress, *events);
      it = operations.erase(it);
      moved = true;
    } else {
      if (operation.decided()) operation.settle(*events);
      ++it;
    }
  }
  return moved;
}

bool TrafficManager::State::ring_doorbells() noexcept {
  const Peers::Doorbell rung = peers.doorbell();
  // A peer that is slow to read its immediates wakes nobody: look again soon.
  if (rung.back_pressure) {
    progress.wake_at_ns = std::min(progress.wake_at_ns, progress.now_ns + 200'000);
  }
  return rung.posted;
}

void TrafficManager::State::sleep() noexcept {
  if (!peers.arm()) return io->submit();
  if (store_io) progress.wake_at_ns = std::min(progress.wake_at_ns, store_io->next_look_ns());
  if (peers.draining()) {
    progress.wake_at_ns = std::min(progress.wake_at_ns, progress.now_ns + 10'000'000);
  }
  event_fds.clear();
  event_fds.push_back(wake->fd());
  peers.append_event_fds(event_fds);
  io->wait(event_fds, progress.wake_at_ns);
}

// Every operation is stopped and drained, so that no memory is given up under a transfer.
void TrafficManager::State::stop_all() noexcept {
  take_commands();
  for (auto& operation : operations) operation->ticket()->cancel();
  while (!operations.empty() || io->in_flight() > 0) {
    progress.now_ns = now_ns();
    if (store_io) store_io->poll();
    peers.poll();
    step_operations();
    io->submit();
    ring_doorbells();
    progress.wake_at_ns = now_ns() + 1'000'000;
    sleep();
  }
}

TrafficManager::TrafficManager(std::shared_ptr<BlockStore> store, std::shared_ptr<BufferPool> pool,
                               std::shared_ptr<MemoryRegion> device, const BlockLayout& layout,
                               const TrafficOptions& options)
    : state_(std::make_unique<State>(std::move(store), std::move(pool), std::move(device), layout,
                                     options)) {}

TrafficManager::~TrafficManager() = default;

std::shared_ptr<LayerStream> TrafficManager::make_stream(uint32_t expected) {
  return std::make_shared<LayerStream>(state_->layout.num_layers(), expected, state_->events,
                                       state_->wake);
}

std::shared_ptr<Ticket> TrafficManager::load(LoadSpec spec) {
  require(state_->store != nullptr, "load needs a store");
  require(spec.chain.size() == spec.slots.size(), "load needs one slot per block");
  check_slots(*state_->pool, spec.slots);
  return state_->submit(make_load(std::move(spec), state_->layout, state_->stats));
}

std::shared_ptr<Ticket> TrafficManager::persist(PersistSpec spec) {
  require(state_->store != nullptr, "persist needs a store");
  require(spec.chain.size() == spec.slots.size(), "persist needs one slot per block");
  check_slots(*state_->pool, spec.slots);
  // Admission may scan the directory and evict, so it runs here and not in the progress thread.
  const Admission admitted = state_->store->admit(spec.chain);
  spec.chain.resize(admitted.blocks);
  spec.slots.resize(admitted.blocks);
  return state_->submit(make_persist(std::move(spec), state_->store, admitted.reserved));
}

std::shared_ptr<Ticket> TrafficManager::prefetch(std::vector<BlockId> chain) {
  require(state_->store_io != nullptr && state_->store_io->memory_tier() != nullptr,
          "prefetch needs a store and memory_blocks");
  return state_->submit(make_prefetch(std::move(chain), state_->layout));
}

std::shared_ptr<Ticket> TrafficManager::stage(MoveSpec spec) {
  check_move(spec, MoveKind::kStage, state_->layout, *state_->pool, state_->device != nullptr);
  return state_->submit(make_move(MoveKind::kStage, std::move(spec), state_->layout.num_layers()));
}

std::shared_ptr<Ticket> TrafficManager::stage_from_peer(MoveSpec spec) {
  check_move(spec, MoveKind::kStageFromPeer, state_->layout, *state_->pool,
             state_->device != nullptr);
  return state_->submit(
      make_move(MoveKind::kStageFromPeer, std::move(spec), state_->layout.num_layers()));
}

std::shared_ptr<Ticket> TrafficManager::push(MoveSpec spec) {
  check_move(spec, MoveKind::kPush, state_->layout, *state_->pool, state_->device != nullptr);
  return state_->submit(make_move(MoveKind::kPush, std::move(spec), state_->layout.num_layers()));
}

std::shared_ptr<Ticket> TrafficManager::serve(MoveSpec spec) {
  check_move(spec, MoveKind::kServe, state_->layout, *state_->pool, state_->device != nullptr);
  return state_->submit(make_move(MoveKind::kServe, std::move(spec), state_->layout.num_layers()));
}

uint32_t TrafficManager::open_receive(std::shared_ptr<LayerStream> stream) {
  require(stream != nullptr, "a receive needs a stream");
  return state_->peers.open_receive(std::move(stream));
}

void TrafficManager::close_receive(uint32_t tag) {
  state_->peers.close_receive(tag);
}

PeerId TrafficManager::connect(const std::string& address, int64_t deadline_ns) {
  require(state_->listener != nullptr, "connecting needs a listen address of our own");
  const PeerId id = state_->peers.add(state_->listener->connect(address, deadline_ns));
  state_->wake->ring();
  return id;
}

PeerId TrafficManager::wait_peer(const std::string& name, int64_t deadline_ns) {
  return state_->peers.wait(name, deadline_ns);
}

bool TrafficManager::peer_alive(PeerId peer) const {
  return state_->peers.alive(peer);
}

std::vector<LinkAttributes> TrafficManager::peer_attributes(PeerId peer) const {
  return state_->peers.attributes(peer);
}

WorkRingCounters TrafficManager::ring_counters(TrafficClass traffic_class) const {
  return state_->peers.counters(traffic_class);
}

std::vector<std::pair<std::string, uint64_t>> TrafficManager::hardware_counters() const {
  using Counters = std::vector<std::pair<std::string, uint64_t>>;
  return state_->domain ? state_->domain->hardware_counters() : Counters{};
}

uint64_t TrafficManager::read_queue_tokens() const noexcept {
  return state_->stats.pending_read_bytes.load(std::memory_order_relaxed) /
         state_->layout.bytes_per_token();
}

TrafficCounters TrafficManager::counters(TrafficKind kind) const noexcept {
  return state_->stats.counters(kind);
}

MemoryTierStats TrafficManager::memory_tier_stats() const noexcept {
  const bool has = state_->store_io != nullptr && state_->store_io->memory_tier() != nullptr;
  return has ? state_->store_io->memory_tier()->stats() : MemoryTierStats{};
}

void TrafficManager::set_cap(TrafficKind kind, uint64_t bytes_per_second) noexcept {
  state_->buckets[static_cast<size_t>(kind)].set_rate(bytes_per_second);
}

std::vector<TraceEvent> TrafficManager::take_trace() {
  return state_->stats.take_trace();
}

int TrafficManager::event_fd() const noexcept {
  return state_->events->fd();
}
void TrafficManager::drain_events() noexcept {
  state_->events->drain();
}
std::string_view TrafficManager::io_backend() const noexcept {
  return state_->io->backend();
}
const std::string& TrafficManager::io_fallback_reason() const noexcept {
  return state_->io->fallback_reason();
}

}  // namespace kvtransfer
