#include "bind.h"
#include "kvtransfer/traffic_manager.h"

#include <map>

namespace kvtransfer::python {

namespace {

void bind_ticket(py::module_& m) {
  py::class_<Ticket, std::shared_ptr<Ticket>>(m, "Ticket", "How one operation went.")
      .def_property_readonly("done", &Ticket::done)
      .def(
          "wait",
          [](const Ticket& self, double timeout_s) {
            const py::gil_scoped_release release;
            return self.wait(deadline_from(timeout_s));
          },
          py::arg("timeout_s"), "True once done; False when the time is over first.")
      .def("cancel", &Ticket::cancel)
      .def(
          "check",
          [](const Ticket& self) {
            if (self.done() && !self.outcome().ok()) raise_outcome(self.outcome());
          },
          "Raises the error the operation ended with, if any.")
      .def_property_readonly("error",
                             [](const Ticket& self) -> py::object {
                               if (!self.done() || self.outcome().ok()) return py::none();
                               return py::make_tuple(
                                   std::string(error_code_name(self.outcome().code)),
                                   self.outcome().text);
                             })
      .def_property_readonly("blocks",
                             [](const Ticket& self) { return self.done() ? self.blocks() : 0; })
      .def_property_readonly(
          "fresh",
          [](const Ticket& self) { return self.done() ? self.fresh() : std::vector<bool>{}; })
      .def_property_readonly("num_bytes",
                             [](const Ticket& self) { return self.done() ? self.bytes() : 0; })
      .def_property_readonly("end_ns",
                             [](const Ticket& self) { return self.done() ? self.end_ns() : 0; })
      .def_property_readonly("seconds", [](const Ticket& self) {
        return self.done() ? static_cast<double>(self.end_ns() - self.begin_ns()) * 1e-9 : 0.0;
      });
}

TrafficKind kind_from(const std::string& name) {
  for (size_t i = 0; i < kNumTrafficKinds; ++i) {
    if (traffic_kind_name(static_cast<TrafficKind>(i)) == name) return static_cast<TrafficKind>(i);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "no traffic kind '" + name +
                  "'; there are storage_read, storage_write, device_copy, network_read and "
                  "network_write");
}

Transport transport_from(const std::string& name) {
  if (name == "shm") return Transport::kShm;
  if (name == "verbs") return Transport::kVerbs;
  throw Error(ErrorCode::kInvalidArgument, "no transport '" + name + "'; there are shm and verbs");
}

CopyBackend copy_from(const std::string& name) {
  if (name == "cpu") return CopyBackend::kCpu;
  if (name == "nic") return CopyBackend::kNic;
  throw Error(ErrorCode::kInvalidArgument, "no copy backend '" + name + "'; there are cpu and nic");
}

}  // namespace

TrafficClass traffic_class_from(const std::string& name) {
  for (size_t i = 0; i < kNumTrafficClasses; ++i) {
    const auto traffic_class = static_cast<TrafficClass>(i);
    if (traffic_class_name(traffic_class) == name) return traffic_class;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "no traffic class '" + name + "'; there are kv and model");
}

py::dict to_dict(const LinkAttributes& attributes) {
  py::dict out;
  for (const auto& [name, value] : attributes) out[py::str(name)] = value;
  return out;
}

py::dict to_dict(const WorkRingCounters& c) {
  py::dict out;
  out["work_requests"] = c.work_requests;
  out["doorbells"] = c.doorbells;
  out["signalled"] = c.signalled;
  out["completions"] = c.completions;
  out["back_pressure"] = c.back_pressure;
  out["write_bytes"] = c.write_bytes;
  out["read_bytes"] = c.read_bytes;
  out["flushed"] = c.flushed;
  return out;
}

namespace {

using MoveMethod = std::shared_ptr<Ticket> (TrafficManager::*)(MoveSpec);

template <MoveMethod method>
auto move_function() {
  return [](TrafficManager& self, std::shared_ptr<PagedCache> cache, const Array<int32_t>& pages,
            const Array<uint64_t>& block_starts, uint64_t first_token, uint64_t num_tokens,
            const Array<uint32_t>& slots, std::shared_ptr<LayerStream> after,
            std::shared_ptr<LayerStream> gate, std::shared_ptr<LayerStream> into, PeerId peer,
            uint32_t tag, double timeout_s, uint64_t trace_id, const std::string& traffic_class) {
    MoveSpec spec;
    spec.cache = std::move(cache);
    spec.pages = to_vector(pages);
    spec.block_starts = to_vector(block_starts);
    spec.first_token = first_token;
    spec.num_tokens = num_tokens;
    spec.slots = to_vector(slots);
    spec.after = std::move(after);
    spec.gate = std::move(gate);
    spec.into = std::move(into);
    spec.peer = peer;
    spec.tag = tag;
    spec.deadline_ns = deadline_from(timeout_s);
    spec.trace_id = trace_id;
    spec.traffic_class = traffic_class_from(traffic_class);
    const py::gil_scoped_release release;
    return (self.*method)(std::move(spec));
  };
}

template <MoveMethod method>
void def_move(py::class_<TrafficManager, std::shared_ptr<TrafficManager>>& cls, const char* name,
              const char* doc) {
  cls.def(name, move_function<method>(), py::kw_only(), py::arg("cache"), py::arg("pages"),
          py::arg("block_starts"), py::arg("first_token"), py::arg("num_tokens"),
          py::arg("slots") = py::array_t<uint32_t>(), py::arg("after") = nullptr,
          py::arg("gate") = nullptr, py::arg("into") = nullptr, py::arg("peer") = 0,
          py::arg("tag") = 0, py::arg("timeout_s") = 1e9, py::arg("trace_id") = 0,
          py::arg("traffic_class") = "kv", doc);
}

void bind_operations(py::class_<TrafficManager, std::shared_ptr<TrafficManager>>& cls) {
  cls.def(
      "load",
      [](TrafficManager& self, const Array<uint8_t>& keys, const py::bytes& parent,
         const Array<uint32_t>& slots, uint32_t parts, std::shared_ptr<LayerStream> into,
         double timeout_s, uint64_t trace_id) {
        LoadSpec spec{to_chain(keys, parent), to_vector(slots),         parts,
                      std::move(into),        deadline_from(timeout_s), trace_id};
        const py::gil_scoped_release release;
        return self.load(std::move(spec));
      },
      py::kw_only(), py::arg("keys"), py::arg("parent"), py::arg("slots"), py::arg("parts") = 1,
      py::arg("into") = nullptr, py::arg("timeout_s") = 1e9, py::arg("trace_id") = 0,
      "store -> pool slots. One arrival in `into` per block and layer. The ticket's `blocks` is "
      "the "
      "length of the good prefix.");
  cls.def(
      "persist",
      [](TrafficManager& self, const Array<uint8_t>& keys, const py::bytes& parent,
         const Array<uint32_t>& slots, uint64_t trace_id) {
        PersistSpec spec{to_chain(keys, parent), to_vector(slots), trace_id};
        const py::gil_scoped_release release;
        return self.persist(std::move(spec));
      },
      py::kw_only(), py::arg("keys"), py::arg("parent"), py::arg("slots"), py::arg("trace_id") = 0,
      "pool slots -> store. The ticket's `blocks` is how many the store has then.");
  cls.def(
      "prefetch",
      [](TrafficManager& self, const Array<uint8_t>& keys, const py::bytes& parent) {
        auto chain = to_chain(keys, parent);
        const py::gil_scoped_release release;
        return self.prefetch(std::move(chain));
      },
      py::kw_only(), py::arg("keys"), py::arg("parent"),
      "store -> memory tier, below all other reads; needs memory_blocks.");
  def_move<&TrafficManager::stage>(cls, "stage", "pool slots -> device cache, layer by layer.");
  def_move<&TrafficManager::stage_from_peer>(
      cls, "stage_from_peer", "a peer's pool slots -> device cache, layer by layer (RDMA read).");
  def_move<&TrafficManager::push>(
      cls, "push", "device cache -> a peer's pool slots, layer by layer (write + immediate).");
  cls.def(
      "serve",
      [](TrafficManager& self, std::shared_ptr<LayerStream> after, PeerId peer, uint32_t tag,
         const Array<uint32_t>& slots, double timeout_s) {
        MoveSpec spec;
        spec.after = std::move(after);
        spec.peer = peer;
        spec.tag = tag;
        spec.slots = to_vector(slots);
        spec.deadline_ns = deadline_from(timeout_s);
        const py::gil_scoped_release release;
        return self.serve(std::move(spec));
      },
      py::kw_only(), py::arg("after"), py::arg("peer"), py::arg("tag"),
      py::arg("slots") = py::array_t<uint32_t>(), py::arg("timeout_s") = 1e9,
      "Tells a peer, layer by layer, that our slots can be read.");
}

void bind_observation(py::class_<TrafficManager, std::shared_ptr<TrafficManager>>& cls) {
  cls.def_property_readonly("read_queue_tokens", &TrafficManager::read_queue_tokens,
                            "Tokens queued or in flight from storage.")
      .def("counters",
           [](const TrafficManager& self) {
             py::dict out;
             for (size_t i = 0; i < kNumTrafficKinds; ++i) {
               const auto kind = static_cast<TrafficKind>(i);
               const TrafficCounters c = self.counters(kind);
               out[py::str(std::string(traffic_kind_name(kind)))] =
                   py::dict(py::arg("operations") = c.operations, py::arg("bytes") = c.bytes,
                            py::arg("failures") = c.failures);
             }
             return out;
           })
      .def("memory_tier_stats",
           [](const TrafficManager& self) {
             const MemoryTierStats stats = self.memory_tier_stats();
             return py::dict(py::arg("capacity") = stats.capacity, py::arg("blocks") = stats.blocks,
                             py::arg("hits") = stats.hits, py::arg("misses") = stats.misses,
                             py::arg("admitted") = stats.admitted,
                             py::arg("evicted") = stats.evicted);
           })
      .def(
          "ring_counters",
          [](const TrafficManager& self, const std::string& traffic_class) {
            return to_dict(self.ring_counters(traffic_class_from(traffic_class)));
          },
          py::arg("traffic_class") = "kv")
      .def(
          "peer_attributes",
          [](const TrafficManager& self, PeerId peer) {
            py::list out;
            for (const auto& attributes : self.peer_attributes(peer)) {
              out.append(to_dict(attributes));
            }
            return out;
          },
          py::arg("peer"), "What the peer's links really are, per traffic class.")
      .def("hardware_counters",
           [](const TrafficManager& self) {
             py::dict out;
             for (const auto& [name, value] : self.hardware_counters()) out[py::str(name)] = value;
             return out;
           })
      .def(
          "set_cap",
          [](TrafficManager& self, const std::string& kind, uint64_t bytes_per_second) {
            self.set_cap(kind_from(kind), bytes_per_second);
          },
          py::arg("kind"), py::arg("bytes_per_second"), "0 lifts the cap.")
      .def(
          "take_trace",
          [](TrafficManager& self) {
            std::vector<TraceEvent> events;
            {
              const py::gil_scoped_release release;
              events = self.take_trace();
            }
            return to_array(events);
          },
          "Structured array of the pieces finished since the last call (trace=True).")
      .def("event_fd", &TrafficManager::event_fd)
      .def("drain_events", &TrafficManager::drain_events)
      .def_property_readonly(
          "io_backend", [](const TrafficManager& self) { return std::string(self.io_backend()); })
      .def_property_readonly("io_fallback_reason", &TrafficManager::io_fallback_reason);
}

}  // namespace

void bind_traffic_manager(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(TraceEvent, begin_ns, end_ns, bytes, trace_id, layer, kind);
  bind_ticket(m);
  py::class_<TrafficManager, std::shared_ptr<TrafficManager>> cls(
      m, "TrafficManager", "Owns every byte moved in or out of one engine.");
  cls.def(py::init([](std::shared_ptr<BlockStore> store, std::shared_ptr<BufferPool> pool,
                      std::shared_ptr<MemoryRegion> device, const BlockLayout& layout,
                      const std::string& name, uint64_t epoch, const std::string& listen,
                      const std::string& transport, const std::string& copy,
                      const VerbsOptions& verbs, IoBackend io_backend, uint32_t io_depth,
                      const std::map<std::string, uint64_t>& bytes_per_second, bool trace,
                      uint32_t spin_us, uint32_t memory_blocks) {
            TrafficOptions options;
            options.memory_blocks = memory_blocks;
            options.name = name;
            options.epoch = epoch;
            options.listen = listen;
            options.transport = transport_from(transport);
            options.copy = copy_from(copy);
            options.verbs = verbs;
            options.io.backend = io_backend;
            options.io.depth = io_depth;
            options.trace = trace;
            options.spin_us = spin_us;
            for (const auto& [kind, rate] : bytes_per_second) {
              options.bytes_per_second[static_cast<size_t>(kind_from(kind))] = rate;
            }
            const py::gil_scoped_release release;
            return std::make_shared<TrafficManager>(std::move(store), std::move(pool),
                                                    std::move(device), layout, options);
          }),
          py::kw_only(), py::arg("store"), py::arg("pool"), py::arg("device"), py::arg("layout"),
          py::arg("name") = "engine", py::arg("epoch") = 0, py::arg("listen") = "",
          py::arg("transport") = "shm", py::arg("copy") = "cpu", py::arg("verbs") = VerbsOptions{},
          py::arg("io_backend") = IoBackend::kAuto, py::arg("io_depth") = 64,
          py::arg("bytes_per_second") = std::map<std::string, uint64_t>{}, py::arg("trace") = false,
          py::arg("spin_us") = TrafficOptions{}.spin_us, py::arg("memory_blocks") = 0)
      .def("make_stream", &TrafficManager::make_stream, py::arg("expected") = 1)
      .def("open_receive", &TrafficManager::open_receive, py::arg("stream"))
      .def("close_receive", &TrafficManager::close_receive, py::arg("tag"))
      .def(
          "connect",
          [](TrafficManager& self, const std::string& address, double timeout_s) {
            const py::gil_scoped_release release;
            return self.connect(address, deadline_from(timeout_s));
          },
          py::arg("address"), py::arg("timeout_s"))
      .def(
          "wait_peer",
          [](TrafficManager& self, const std::string& name, double timeout_s) {
            const py::gil_scoped_release release;
            return self.wait_peer(name, deadline_from(timeout_s));
          },
          py::arg("name"), py::arg("timeout_s"))
      .def("peer_alive", &TrafficManager::peer_alive, py::arg("peer"));
  bind_operations(cls);
  bind_observation(cls);
}

}  // namespace kvtransfer::python
