#include "transport/verbs/api.h"

#include <dlfcn.h>

namespace kvtransfer {

namespace {

constexpr const char* kLibrary = "libibverbs.so.1";

struct Loaded {
  VerbsApi api{};
  std::string why;  // empty: usable
};

template <typename Function>
void find(void* library, Loaded& loaded, Function& slot, const char* name, const char* version) {
  void* symbol = dlvsym(library, name, version);
  if (symbol == nullptr && loaded.why.empty()) {
    loaded.why = std::string(kLibrary) + " has no " + name + "@" + version +
                 " (too old: rdma-core 34 or newer is needed)";
  }
  slot = reinterpret_cast<Function>(symbol);
}

Loaded load_library() {
  Loaded loaded;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* error = dlerror();
    loaded.why = error != nullptr ? error : std::string(kLibrary) + " can't be loaded";
    return loaded;
  }
  VerbsApi& api = loaded.api;
  const auto get = [&](auto& slot, const char* name, const char* version = "IBVERBS_1.1") {
    find(library, loaded, slot, name, version);
  };
  get(api.get_device_list, "ibv_get_device_list");
  get(api.free_device_list, "ibv_free_device_list");
  get(api.get_device_name, "ibv_get_device_name");
  get(api.open_device, "ibv_open_device");
  get(api.close_device, "ibv_close_device");
  get(api.query_device, "ibv_query_device");
  get(api.query_port, "ibv_query_port");
  get(api.query_gid_ex, "_ibv_query_gid_ex", "IBVERBS_1.11");
  get(api.alloc_pd, "ibv_alloc_pd");
  get(api.dealloc_pd, "ibv_dealloc_pd");
  get(api.reg_mr, "ibv_reg_mr_iova2", "IBVERBS_1.8");
  get(api.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  get(api.dereg_mr, "ibv_dereg_mr");
  get(api.create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0");
  get(api.destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
  get(api.create_cq, "ibv_create_cq");
  get(api.destroy_cq, "ibv_destroy_cq");
  get(api.get_cq_event, "ibv_get_cq_event");
  get(api.ack_cq_events, "ibv_ack_cq_events");
  get(api.create_qp, "ibv_create_qp");
  get(api.qp_to_qp_ex, "ibv_qp_to_qp_ex", "IBVERBS_1.6");
  get(api.modify_qp, "ibv_modify_qp");
  get(api.query_qp, "ibv_query_qp");
  get(api.destroy_qp, "ibv_destroy_qp");
  get(api.get_async_event, "ibv_get_async_event");
  get(api.ack_async_event, "ibv_ack_async_event");
  get(api.wc_status_str, "ibv_wc_status_str");
  return loaded;
}

}  // namespace

const VerbsApi* VerbsApi::load(std::string* why) {
  static const Loaded loaded = load_library();
  if (why != nullptr) *why = loaded.why;
  return loaded.why.empty() ? &loaded.api : nullptr;
}

}  // namespace kvtransfer
