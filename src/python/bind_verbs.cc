#include "bind.h"
#include "kvtransfer/verbs.h"

#include <limits>
#include <optional>

namespace kvtransfer::python {

namespace {

template <class T>
T bounded(int64_t value, const char* name) {
  if (value < 0 || value > int64_t{std::numeric_limits<T>::max()}) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string("verbs: ") + name + " can't be " + std::to_string(value));
  }
  return static_cast<T>(value);
}

PostMethod post_method_from(const std::string& name) {
  if (name == "auto") return PostMethod::kAuto;
  if (name == "post_send") return PostMethod::kPostSend;
  if (name == "wr_api") return PostMethod::kWorkRequestApi;
  throw Error(ErrorCode::kInvalidArgument,
              "verbs: no post method '" + name + "'; there are auto, post_send and wr_api");
}

ClassOfService to_service(const std::pair<int64_t, int64_t>& pair) {
  return {bounded<uint32_t>(pair.first, "service_level"),
          bounded<uint32_t>(pair.second, "traffic_class")};
}

VerbsOptions make_options(const std::string& device, int64_t port, std::optional<int64_t> gid_index,
                          int64_t path_mtu_bytes, int64_t timeout, int64_t retry_count,
                          int64_t rnr_retry, int64_t min_rnr_timer, int64_t rd_atomic,
                          int64_t send_depth, int64_t receive_depth, int64_t queue_pairs,
                          const std::string& post_method, bool relaxed_ordering,
                          std::pair<int64_t, int64_t> kv_class,
                          std::pair<int64_t, int64_t> model_class) {
  VerbsOptions out;
  out.device = device;
  out.port = bounded<uint8_t>(port, "port");
  if (gid_index) out.gid_index = bounded<uint8_t>(*gid_index, "gid_index");
  out.path_mtu_bytes = bounded<uint32_t>(path_mtu_bytes, "path_mtu_bytes");
  out.timeout = bounded<uint8_t>(timeout, "timeout");
  out.retry_count = bounded<uint8_t>(retry_count, "retry_count");
  out.rnr_retry = bounded<uint8_t>(rnr_retry, "rnr_retry");
  out.min_rnr_timer = bounded<uint8_t>(min_rnr_timer, "min_rnr_timer");
  out.rd_atomic = bounded<uint8_t>(rd_atomic, "rd_atomic");
  out.send_depth = bounded<uint32_t>(send_depth, "send_depth");
  out.receive_depth = bounded<uint32_t>(receive_depth, "receive_depth");
  out.queue_pairs = bounded<uint32_t>(queue_pairs, "queue_pairs");
  out.post_method = post_method_from(post_method);
  out.relaxed_ordering = relaxed_ordering;
  out.classes = {to_service(kv_class), to_service(model_class)};
  return out;
}

py::dict to_dict(const VerbsPort& port) {
  py::list gids;
  for (const VerbsGid& gid : port.gids) {
    gids.append(py::dict(py::arg("index") = gid.index, py::arg("gid") = gid.gid,
                         py::arg("type") = gid.type));
  }
  return py::dict(py::arg("device") = port.device, py::arg("port") = port.port,
                  py::arg("link_layer") = port.link_layer, py::arg("state") = port.state,
                  py::arg("mtu_bytes") = port.mtu_bytes, py::arg("gids") = gids);
}

py::dict to_dict(const VerbsRegion& region) {
  return py::dict(py::arg("address") = region.address, py::arg("num_bytes") = region.bytes,
                  py::arg("local_key") = region.local_key,
                  py::arg("remote_key") = region.remote_key);
}

void bind_domain(py::module_& m) {
  py::class_<VerbsDomain, std::shared_ptr<VerbsDomain>>(
      m, "VerbsDomain", "One opened device and port with one registration per region.")
      .def(py::init([](const VerbsOptions& options,
                       std::vector<std::shared_ptr<MemoryRegion>> regions, size_t exported,
                       bool loopback) {
             const py::gil_scoped_release release;
             return VerbsDomain::open(options, std::move(regions), exported, loopback);
           }),
           py::kw_only(), py::arg("options") = VerbsOptions{}, py::arg("regions"),
           py::arg("exported") = 1, py::arg("loopback") = false)
      .def(
          "region",
          [](const VerbsDomain& self, size_t index) { return to_dict(self.region(index)); },
          py::arg("index"), "Address, size and keys, for peers that post with raw addresses.")
      .def(
          "register_dmabuf",
          [](VerbsDomain& self, int fd, uint64_t offset, uint64_t num_bytes) {
            return to_dict(self.register_dmabuf(fd, offset, num_bytes));
          },
          py::arg("fd"), py::arg("offset"), py::arg("num_bytes"),
          "Registers device memory behind a dma-buf descriptor.")
      .def("hardware_counters",
           [](const VerbsDomain& self) {
             py::dict out;
             for (const auto& [name, value] : self.hardware_counters()) out[py::str(name)] = value;
             return out;
           })
      .def(
          "make_endpoint",
          [](VerbsDomain& self, const std::string& traffic_class, const std::string& name,
             uint64_t epoch) {
            return self.make_endpoint(traffic_class_from(traffic_class), name, epoch);
          },
          py::kw_only(), py::arg("traffic_class") = "kv", py::arg("name"), py::arg("epoch") = 0)
      .def(
          "make_loopback_ring",
          [](VerbsDomain& self, uint32_t batch) {
            return std::make_unique<LinkRing>(self.make_loopback(), batch);
          },
          py::arg("batch") = WorkRingOptions{}.batch,
          "A ring whose writes go through the NIC into our own regions.");
  py::class_<VerbsEndpoint>(m, "VerbsEndpoint", "Queue pairs towards one peer, not connected yet.")
      .def("blob",
           [](const VerbsEndpoint& self) {
             const auto blob = self.blob();
             return py::bytes(reinterpret_cast<const char*>(blob.data()), blob.size());
           })
      .def(
          "connect",
          [](VerbsEndpoint& self, const py::bytes& peer, uint32_t batch) {
            const std::string_view view = peer;
            const std::span blob(reinterpret_cast<const uint8_t*>(view.data()), view.size());
            const py::gil_scoped_release release;
            return std::make_unique<LinkRing>(self.connect(blob), batch);
          },
          py::arg("peer"), py::arg("batch") = WorkRingOptions{}.batch,
          "Connects to the endpoint the blob describes. Call once.");
}

}  // namespace

void bind_verbs(py::module_& m) {
  py::class_<VerbsOptions>(m, "VerbsOptions", "How queue pairs are set up; see verbs.h.")
      .def(py::init(&make_options), py::kw_only(), py::arg("device") = "", py::arg("port") = 1,
           py::arg("gid_index") = py::none(), py::arg("path_mtu_bytes") = 0,
           py::arg("timeout") = 14, py::arg("retry_count") = 7, py::arg("rnr_retry") = 7,
           py::arg("min_rnr_timer") = 12, py::arg("rd_atomic") = 16, py::arg("send_depth") = 256,
           py::arg("receive_depth") = 512, py::arg("queue_pairs") = 1,
           py::arg("post_method") = "auto", py::arg("relaxed_ordering") = false,
           py::arg("kv_class") = std::pair<int64_t, int64_t>{0, 0},
           py::arg("model_class") = std::pair<int64_t, int64_t>{0, 0})
      .def_readonly("device", &VerbsOptions::device);
  bind_domain(m);
  m.def(
      "verbs_devices",
      [] {
        std::string why;
        std::vector<VerbsPort> ports;
        {
          const py::gil_scoped_release release;
          ports = verbs_devices(&why);
        }
        py::list out;
        for (const VerbsPort& port : ports) out.append(to_dict(port));
        return py::make_tuple(out, why);
      },
      "(ports, reason): every port of every device, or none and why.");
  m.def(
      "adopt_queue_pair",
      [](uintptr_t queue_pair, uint32_t send_depth,
         std::vector<std::shared_ptr<MemoryRegion>> regions,
         const std::vector<std::tuple<uint64_t, uint64_t, uint32_t>>& remote, uint32_t batch,
         py::object owner) {
        AdoptedQueuePair adopted;
        adopted.queue_pair = reinterpret_cast<void*>(queue_pair);
        adopted.send_depth = send_depth;
        adopted.regions = std::move(regions);
        for (const auto& [address, bytes, key] : remote) {
          adopted.remote.push_back({address, bytes, 0, key});
        }
        return std::make_unique<LinkRing>(adopt_queue_pair(std::move(adopted)), batch,
                                          std::move(owner));
      },
      py::arg("queue_pair"), py::arg("send_depth"), py::arg("regions"), py::arg("remote"),
      py::arg("batch") = WorkRingOptions{}.batch, py::arg("owner") = py::none(),
      "A ring over an ibv_qp* that somebody else connected; `remote` is [(address, bytes, key)]; "
      "`owner` is kept alive.");
}

}  // namespace kvtransfer::python
