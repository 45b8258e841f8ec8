#include "transport/verbs/device.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <algorithm>

#include "kvtransfer/error.h"

namespace kvtransfer {

namespace {

// The inline ibv_query_port() would call back into the library when the context is an old one.
int query_port(const VerbsApi& api, ibv_context* context, uint8_t port, ibv_port_attr& out) {
  memset(&out, 0, sizeof out);
  verbs_context* extended = verbs_get_ctx_op(context, query_port);
  if (extended != nullptr) return extended->query_port(context, port, &out, sizeof out);
  return api.query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&out));
}

bool is_ipv4(const ibv_gid& gid) {
  static constexpr uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

const char* state_name(ibv_port_state state) {
  static constexpr const char* kNames[] = {"no change", "down", "init", "armed", "active", "defer"};
  return static_cast<size_t>(state) < std::size(kNames) ? kNames[state] : "unknown";
}

const char* gid_type_name(uint32_t type) {
  static constexpr const char* kNames[] = {"IB", "RoCE v1", "RoCE v2"};
  return type < std::size(kNames) ? kNames[type] : "unknown";
}

// Calls `visit` with every entry of the GID table that is filled in.
template <typename Visit>
void each_gid(const VerbsApi& api, ibv_context* context, uint8_t port, int length, Visit visit) {
  for (int i = 0; i < length; ++i) {
    ibv_gid_entry entry{};
    if (api.query_gid_ex(context, port, static_cast<uint32_t>(i), &entry, 0, sizeof entry) == 0) {
      visit(entry);
    }
  }
}

class DeviceList {
 public:
  explicit DeviceList(const VerbsApi& api) : api_(api) {
    int count = 0;
    list_ = api.get_device_list(&count);
    error_ = errno;
    if (list_ != nullptr) devices_.assign(list_, list_ + count);
    // By name: the kernel's order changes with every device that comes back.
    std::sort(devices_.begin(), devices_.end(), [&api](ibv_device* a, ibv_device* b) {
      return std::string_view(api.get_device_name(a)) < api.get_device_name(b);
    });
  }
  // The library crashes when it is given its own null list.
  ~DeviceList() {
    if (list_ != nullptr) api_.free_device_list(list_);
  }
  DeviceList(const DeviceList&) = delete;
  const std::vector<ibv_device*>& devices() const { return devices_; }
  std::string why_empty() const {
    if (list_ != nullptr) return "no RDMA device (`rdma link` lists them)";
    return std::string("the kernel has no RDMA support loaded (") + strerror(error_) +
           "; `modprobe ib_uverbs` and the device's driver)";
  }

 private:
  const VerbsApi& api_;
  int error_ = 0;
  ibv_device** list_;
  std::vector<ibv_device*> devices_;
};

void append_ports(const VerbsApi& api, ibv_context* context, const std::string& device,
                  std::vector<VerbsPort>& out) {
  ibv_device_attr attributes{};
  if (api.query_device(context, &attributes) != 0) return;
  for (uint8_t number = 1; number <= attributes.phys_port_cnt; ++number) {
    ibv_port_attr attr;
    if (query_port(api, context, number, attr) != 0) continue;
    VerbsPort port;
    port.device = device;
    port.port = number;
    port.link_layer = attr.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
    port.state = state_name(attr.state);
    port.mtu_bytes = mtu_bytes(attr.active_mtu);
    each_gid(api, context, number, attr.gid_tbl_len, [&](const ibv_gid_entry& entry) {
      port.gids.push_back({entry.gid_index, gid_text(entry.gid), gid_type_name(entry.gid_type)});
    });
    out.push_back(std::move(port));
  }
}

}  // namespace

std::string gid_text(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  return text;
}

uint32_t mtu_bytes(ibv_mtu mtu) {
  return 128u << static_cast<uint32_t>(mtu);
}

std::vector<VerbsPort> verbs_devices(std::string* why) {
  std::string reason;
  std::vector<VerbsPort> ports;
  if (const VerbsApi* api = VerbsApi::load(&reason); api != nullptr) {
    const DeviceList list(*api);
    if (list.devices().empty()) reason = list.why_empty();
    for (ibv_device* device : list.devices()) {
      const std::string name = api->get_device_name(device);
      ibv_context* context = api->open_device(device);
      if (context == nullptr) {
        reason = name + " can't be opened: " + strerror(errno);
        continue;
      }
      append_ports(*api, context, name, ports);
      api->close_device(context);
    }
  }
  if (why != nullptr) *why = ports.empty() ? reason : "";
  return ports;
}

VerbsDevice::VerbsDevice(const VerbsApi& api, const VerbsOptions& options)
    : api_(api), options_(options) {
  const DeviceList list(api_);
  if (list.devices().empty()) throw Error(ErrorCode::kUnsupported, "verbs: " + list.why_empty());
  std::string seen;
  for (ibv_device* device : list.devices()) {
    const std::string name = api_.get_device_name(device);
    seen += (seen.empty() ? "" : ", ") + name;
    if (!options_.device.empty() && name != options_.device) continue;
    context_ = api_.open_device(device);
    if (context_ == nullptr) throw Error(ErrorCode::kUnsupported, "verbs: opening " + name, errno);
    name_ = name;
    ibv_port_attr attr;
    const bool active =
        query_port(api_, context_, options_.port, attr) == 0 && attr.state == IBV_PORT_ACTIVE;
    if (active || !options_.device.empty()) break;
    api_.close_device(context_);
    context_ = nullptr;
  }
  if (context_ == nullptr) {
    throw Error(ErrorCode::kUnsupported,
                options_.device.empty()
                    ? "verbs: no device has an active port " + std::to_string(options_.port) +
                          " (there are " + seen + ")"
                    : "verbs: no device '" + options_.device + "' (there are " + seen + ")");
  }
  try {
    choose_port();
    choose_gid();
    pd_ = api_.alloc_pd(context_);
    if (pd_ == nullptr) throw Error(ErrorCode::kExhausted, "verbs: protection domain", errno);
  } catch (...) {
    api_.close_device(context_);
    throw;
  }
  // One thread owns the queue pairs: the provider may leave its locks out.
  ibv_td_init_attr nothing{};
  thread_domain_ = ibv_alloc_td(context_, &nothing);
  if (thread_domain_ != nullptr) {
    ibv_parent_domain_init_attr parent{};
    parent.pd = pd_;
    parent.td = thread_domain_;
    parent_ = ibv_alloc_parent_domain(context_, &parent);
  }
  fcntl(context_->async_fd, F_SETFL, fcntl(context_->async_fd, F_GETFL) | O_NONBLOCK);
}

VerbsDevice::~VerbsDevice() {
  if (parent_ != nullptr) api_.dealloc_pd(parent_);
  if (thread_domain_ != nullptr) ibv_dealloc_td(thread_domain_);
  api_.dealloc_pd(pd_);
  api_.close_device(context_);
}

void VerbsDevice::choose_port() {
  ibv_device_attr device{};
  ibv_port_attr port;
  const int error = query_port(api_, context_, options_.port, port);
  if (api_.query_device(context_, &device) != 0 || error != 0) {
    throw Error(ErrorCode::kInvalidArgument,
                "verbs: " + name_ + " has no port " + std::to_string(options_.port), error);
  }
  if (port.state != IBV_PORT_ACTIVE) {
    throw Error(ErrorCode::kUnsupported, "verbs: port " + std::to_string(options_.port) + " of " +
                                             name_ + " is " + state_name(port.state) +
                                             " (`ip link set ... up`, or the subnet manager)");
  }
  lid_ = port.lid;
  ethernet_ = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  max_message_bytes_ = port.max_msg_sz;
  mtu_ = port.active_mtu;
  if (options_.path_mtu_bytes != 0) {
    int wanted = IBV_MTU_256;
    while (wanted < IBV_MTU_4096 &&
           mtu_bytes(static_cast<ibv_mtu>(wanted)) < options_.path_mtu_bytes)
      ++wanted;
    if (mtu_bytes(static_cast<ibv_mtu>(wanted)) != options_.path_mtu_bytes || wanted > mtu_) {
      throw Error(ErrorCode::kInvalidArgument,
                  "verbs: path MTU " + std::to_string(options_.path_mtu_bytes) + "; " + name_ +
                      " takes 256, 512 ... up to " + std::to_string(mtu_bytes(mtu_)));
    }
    mtu_ = static_cast<ibv_mtu>(wanted);
  }
  const auto at_most = [&](int limit) {
    return static_cast<uint8_t>(std::clamp<int>(limit, 1, std::max<int>(options_.rd_atomic, 1)));
  };
  rd_atomic_out_ = at_most(device.max_qp_init_rd_atom);
  rd_atomic_in_ = at_most(device.max_qp_rd_atom);
  max_queue_depth_ = static_cast<uint32_t>(device.max_qp_wr);
  max_completions_ = static_cast<uint32_t>(device.max_cqe);
}

// RoCE v2 over IPv4 is what nearly every Ethernet fabric routes; then any RoCE v2; then index 0.
void VerbsDevice::choose_gid() {
  ibv_port_attr port;
  query_port(api_, context_, options_.port, port);
  int best = -1;
  each_gid(api_, context_, options_.port, port.gid_tbl_len, [&](const ibv_gid_entry& entry) {
    int score = 0;
    if (entry.gid_type == IBV_GID_TYPE_ROCE_V2) score = is_ipv4(entry.gid) ? 2 : 1;
    if (options_.gid_index) score = *options_.gid_index == entry.gid_index ? 3 : -1;
    if (score <= best) return;
    best = score;
    gid_ = entry.gid;
    gid_index_ = static_cast<uint8_t>(entry.gid_index);
  });
  if (best < 0 && (ethernet_ || options_.gid_index)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "verbs: port " + std::to_string(options_.port) + " of " + name_ +
            (options_.gid_index ? " has no GID at index " + std::to_string(*options_.gid_index)
                                : " has no GID (give its interface an address)"));
  }
}

std::string VerbsDevice::describe() const {
  return name_ + " port " + std::to_string(options_.port) + " gid " + std::to_string(gid_index_) +
         " (" + gid_text(gid_) + ")";
}

void VerbsDevice::poll_events() noexcept {
  ibv_async_event event;
  while (api_.get_async_event(context_, &event) == 0) {
    if (event.event_type == IBV_EVENT_DEVICE_FATAL) lost_.store(true, std::memory_order_relaxed);
    api_.ack_async_event(&event);
  }
}

}  // namespace kvtransfer
