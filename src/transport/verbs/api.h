// VerbsApi: libibverbs, loaded at run time, so that one binary runs with and without an RDMA stack.
//
// The table holds the library's exported functions under their versioned symbols. The data path
// (post, poll, arm) is inline in <infiniband/verbs.h> and goes through the context's own
// operations; the inline functions that would call back into the library must not be used from our
// code. Loaded once and never unloaded. Thread-safe.
#pragma once

#include <infiniband/verbs.h>

#include <string>

// The header makes macros of these two; the table calls the functions behind them.
#undef ibv_reg_mr
#undef ibv_query_port

namespace kvtransfer {

struct VerbsApi {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  decltype(&::ibv_query_port) query_port;
  decltype(&::_ibv_query_gid_ex) query_gid_ex;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  decltype(&::ibv_reg_mr_iova2) reg_mr;
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_qp_to_qp_ex) qp_to_qp_ex;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_query_qp) query_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_wc_status_str) wc_status_str;

  // Null when there is no usable library; `why` then says what was tried.
  static const VerbsApi* load(std::string* why = nullptr);
};

}  // namespace kvtransfer
