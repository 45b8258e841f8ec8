#include <cstring>

#include "bind.h"
#include "kvtransfer/block_store.h"
#include "store/block_file.h"

namespace kvtransfer::python {

namespace {

py::dict to_dict(const StoreStats& stats) {
  py::dict out;
  out["blocks"] = stats.blocks;
  out["bytes"] = stats.bytes;
  out["hits"] = stats.hits;
  out["misses"] = stats.misses;
  out["published"] = stats.published;
  out["duplicates"] = stats.duplicates;
  out["evicted"] = stats.evicted;
  out["corrupt"] = stats.corrupt;
  out["unremovable"] = stats.unremovable;
  out["swept_temporaries"] = stats.swept_temporaries;
  out["refused_full"] = stats.refused_full;
  out["writes_stopped"] = stats.writes_stopped;
  out["mount_slow"] = stats.mount_slow;
  return out;
}

std::vector<uint32_t> slots_for(const std::vector<BlockId>& chain, const BufferPool& pool,
                                const Array<uint32_t>& slots) {
  auto out = to_vector(slots);
  if (out.size() != chain.size()) {
    throw Error(ErrorCode::kInvalidArgument, "needs one slot per key");
  }
  for (const uint32_t slot : out) {
    if (slot >= pool.num_slots()) throw py::index_error("slot out of range");
  }
  return out;
}

StoreOptions to_options(uint64_t max_bytes, uint64_t free_space_floor, bool fsync,
                        uint32_t stale_temporary_seconds, bool verify_checksums,
                        bool remove_corrupt, double operation_timeout_s,
                        const BlockEncoding& encoding = {}) {
  if (!(operation_timeout_s >= 0 && operation_timeout_s < 4e6)) {
    throw Error(ErrorCode::kInvalidArgument, "operation_timeout_s must be in 0..4e6");
  }
  StoreOptions options;
  options.max_bytes = max_bytes;
  options.free_space_floor = free_space_floor;
  options.durability = fsync ? Durability::kFsync : Durability::kNone;
  options.stale_temporary_seconds = stale_temporary_seconds;
  options.verify_checksums = verify_checksums;
  options.remove_corrupt = remove_corrupt;
  options.encoding = encoding;
  options.operation_timeout_ms = static_cast<uint32_t>(operation_timeout_s * 1000);
  return options;
}

BlockEncoding to_encoding(const std::string& kind, uint32_t group) {
  using Kind = BlockEncoding::Kind;
  if (kind == "raw") return {Kind::kRaw, group};
  if (kind == "fp8_of_bfloat16") return {Kind::kFp8OfBfloat16, group};
  if (kind == "fp8_of_float16") return {Kind::kFp8OfFloat16, group};
  throw Error(ErrorCode::kInvalidArgument,
              "encoding must be raw, fp8_of_bfloat16 or fp8_of_float16, not '" + kind + "'");
}

// keys [n, 32], parents [n, 32], file times [n] (ns since 1970)
py::tuple to_arrays(const std::vector<std::pair<BlockId, uint64_t>>& blocks) {
  const auto count = static_cast<py::ssize_t>(blocks.size());
  py::array_t<uint8_t> keys({count, py::ssize_t{32}}), parents({count, py::ssize_t{32}});
  py::array_t<uint64_t> times(count);
  for (size_t i = 0; i < blocks.size(); ++i) {
    std::memcpy(keys.mutable_data() + 32 * i, blocks[i].first.key.data(), 32);
    std::memcpy(parents.mutable_data() + 32 * i, blocks[i].first.parent.data(), 32);
    times.mutable_data()[i] = blocks[i].second;
  }
  return py::make_tuple(keys, parents, times);
}

}  // namespace

void bind_block_store(py::module_& m) {
  m.def("header_bytes", &header_pages_bytes, py::arg("num_layers"),
        "Bytes of header pages in front of a Full Block, in files and pool slots.");
  py::class_<BlockStore, std::shared_ptr<BlockStore>>(
      m, "BlockStore", "Full Blocks as files of one directory, found by chained keys.")
      .def(py::init([](const std::string& root, const py::bytes& name_space,
                       const BlockLayout& layout, uint64_t max_bytes, uint64_t free_space_floor,
                       bool fsync, uint32_t stale_temporary_seconds, bool verify_checksums,
                       bool remove_corrupt, double operation_timeout_s, const std::string& encoding,
                       uint32_t encoding_group) {
             const StoreOptions options = to_options(
                 max_bytes, free_space_floor, fsync, stale_temporary_seconds, verify_checksums,
                 remove_corrupt, operation_timeout_s, to_encoding(encoding, encoding_group));
             const BlockKey key = to_key(name_space, "name_space");
             const py::gil_scoped_release release;
             return std::make_shared<BlockStore>(root, key, layout, options);
           }),
           py::arg("root"), py::arg("name_space"), py::arg("layout"), py::arg("max_bytes") = 0,
           py::arg("free_space_floor") = 0, py::arg("fsync") = false,
           py::arg("stale_temporary_seconds") = 300, py::arg("verify_checksums") = true,
           py::arg("remove_corrupt") = true, py::arg("operation_timeout_s") = 10.0,
           py::arg("encoding") = "raw", py::arg("encoding_group") = 0)
      .def_static(
          "open_existing",
          [](const std::string& root, uint64_t max_bytes, uint64_t free_space_floor, bool fsync,
             uint32_t stale_temporary_seconds, bool verify_checksums, bool remove_corrupt,
             double operation_timeout_s) {
            const StoreOptions options =
                to_options(max_bytes, free_space_floor, fsync, stale_temporary_seconds,
                           verify_checksums, remove_corrupt, operation_timeout_s);
            const py::gil_scoped_release release;
            return std::shared_ptr<BlockStore>(BlockStore::open_existing(root, options));
          },
          py::arg("root"), py::arg("max_bytes") = 0, py::arg("free_space_floor") = 0,
          py::arg("fsync") = false, py::arg("stale_temporary_seconds") = 300,
          py::arg("verify_checksums") = true, py::arg("remove_corrupt") = true,
          py::arg("operation_timeout_s") = 10.0,
          "Opens what is there, whatever namespace and layout it is for.")
      .def(
          "lookup",
          [](BlockStore& self, const Array<uint8_t>& keys, const py::bytes& parent) {
            const auto chain = to_chain(keys, parent);
            const py::gil_scoped_release release;
            return self.lookup(chain);
          },
          py::arg("keys"), py::arg("parent"), "Length of the restorable prefix of a chain.")
      .def(
          "get",
          [](BlockStore& self, const Array<uint8_t>& keys, const py::bytes& parent,
             BufferPool& pool, const Array<uint32_t>& slots) {
            const auto chain = to_chain(keys, parent);
            const auto into = slots_for(chain, pool, slots);
            const py::gil_scoped_release release;
            return self.get(chain, pool, into);
          },
          py::arg("keys"), py::arg("parent"), py::arg("pool"), py::arg("slots"),
          "Reads a chain into pool slots; returns the length of the good prefix.")
      .def(
          "put",
          [](BlockStore& self, const Array<uint8_t>& keys, const py::bytes& parent,
             BufferPool& pool, const Array<uint32_t>& slots, uint32_t valid_tokens_of_last) {
            const auto chain = to_chain(keys, parent);
            const auto from = slots_for(chain, pool, slots);
            const py::gil_scoped_release release;
            return self.put(chain, pool, from, valid_tokens_of_last);
          },
          py::arg("keys"), py::arg("parent"), py::arg("pool"), py::arg("slots"),
          py::arg("valid_tokens_of_last") = 0,
          "Writes a chain from pool slots; returns how many blocks the store has then.")
      .def(
          "admit",
          [](BlockStore& self, const Array<uint8_t>& keys, const py::bytes& parent) {
            const auto chain = to_chain(keys, parent);
            Admission admission;
            {
              const py::gil_scoped_release release;
              admission = self.admit(chain);
            }
            return py::make_tuple(admission.blocks, admission.reserved);
          },
          py::arg("keys"), py::arg("parent"),
          "Reserves room for a chain that somebody else writes into the directory; returns how "
          "many "
          "of its blocks may be there, and what end_writes() has to be given afterwards.")
      .def("end_writes", &BlockStore::end_writes, py::arg("reserved"))
      .def("evict", &BlockStore::evict, py::call_guard<py::gil_scoped_release>())
      .def("rescan", &BlockStore::rescan, py::call_guard<py::gil_scoped_release>())
      .def(
          "list",
          [](BlockStore& self) {
            std::vector<std::pair<BlockId, uint64_t>> blocks;
            {
              const py::gil_scoped_release release;
              blocks = self.list();
            }
            return to_arrays(blocks);
          },
          "(keys [n, 32], parents [n, 32], file times [n] in ns since 1970) of all blocks.")
      .def(
          "check_file",
          [](const BlockStore& self, const std::string& path, const py::bytes& key,
             const py::bytes& parent, BufferPool& pool, uint32_t slot) {
            if (slot >= pool.num_slots()) throw py::index_error("slot out of range");
            const BlockId id{to_key(key, "key"), to_key(parent, "parent")};
            const py::gil_scoped_release release;
            return self.check_file(path, id, pool, slot);
          },
          py::arg("path"), py::arg("key"), py::arg("parent"), py::arg("pool"), py::arg("slot"),
          "'' when that file, wherever it lies, is that block whole and right; else why not.")
      .def(
          "read_latency",
          [](const BlockStore& self, double share) {
            return static_cast<double>(self.read_latency_ns(share)) * 1e-9;
          },
          py::arg("share"), "Seconds within which that share of all blocks was read.")
      .def(
          "write_latency",
          [](const BlockStore& self, double share) {
            return static_cast<double>(self.write_latency_ns(share)) * 1e-9;
          },
          py::arg("share"), "Seconds within which that share of all blocks was written.")
      .def(
          "path_of",
          [](const BlockStore& self, const py::bytes& key, const py::bytes& parent) {
            return self.path_of({to_key(key, "key"), to_key(parent, "parent")});
          },
          py::arg("key"), py::arg("parent"))
      .def("stats", [](const BlockStore& self) { return to_dict(self.stats()); })
      .def_property_readonly("root", &BlockStore::root)
      .def_property_readonly("name_space",
                             [](const BlockStore& self) {
                               const BlockKey& key = self.name_space();
                               return py::bytes(reinterpret_cast<const char*>(key.data()), 32);
                             })
      .def_property_readonly("layout", &BlockStore::layout)
      .def_property_readonly("header_bytes", &BlockStore::header_bytes)
      .def_property_readonly("file_bytes", &BlockStore::file_bytes)
      .def_property_readonly("slot_bytes", &BlockStore::slot_bytes)
      .def_property_readonly(
          "encoding", [](const BlockStore& self) { return self.options().encoding.to_string(); },
          "How blocks lie in their files: 'raw', or 'fp8_of_bfloat16 64' with the group's "
          "elements.")
      .def_property_readonly("direct_io", &BlockStore::direct_io);
}

}  // namespace kvtransfer::python
