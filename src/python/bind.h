// Shared by the bind_*.cc files: their registration functions and array conversions.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kvtransfer/block_store.h"
#include "kvtransfer/error.h"
#include "kvtransfer/work_ring.h"

namespace kvtransfer::python {

namespace py = pybind11;

void bind_block_layout(py::module_& m);
void bind_paged_cache(py::module_& m);
void bind_memory_region(py::module_& m);
void bind_buffer_pool(py::module_& m);
void bind_io_queue(py::module_& m);
void bind_block_store(py::module_& m);
void bind_layer_stream(py::module_& m);
void bind_traffic_manager(py::module_& m);
void bind_verbs(py::module_& m);
void bind_work_ring(py::module_& m);

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <class T>
std::vector<T> to_vector(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}
template <class T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

// A key from 32 bytes, or Error.
inline BlockKey to_key(const py::bytes& bytes, const char* what) {
  const std::string_view view = bytes;
  if (view.size() != 32) {
    throw Error(ErrorCode::kInvalidArgument,
                std::string(what) + " must have 32 bytes, got " + std::to_string(view.size()));
  }
  BlockKey key;
  std::copy(view.begin(), view.end(), key.begin());
  return key;
}

// A chain from an array [n, 32] of uint8 that starts under `parent`.
inline std::vector<BlockId> to_chain(const Array<uint8_t>& keys, const py::bytes& parent) {
  if (keys.ndim() != 2 || keys.shape(1) != 32) {
    throw Error(ErrorCode::kInvalidArgument, "keys must be an array [n, 32] of uint8");
  }
  const auto* first = reinterpret_cast<const BlockKey*>(keys.data());
  return chain_ids(to_key(parent, "the chain's parent key"),
                   {first, static_cast<size_t>(keys.shape(0))});
}

// Seconds from now -> absolute deadline. Infinity or more than ten years: none.
inline int64_t deadline_from(double timeout_s) {
  if (!(timeout_s < 3e8)) return kNoDeadline;
  return now_ns() + static_cast<int64_t>(std::max(timeout_s, 0.0) * 1e9);
}

// A link and its ring, as Python holds them.
struct LinkRing {
  LinkRing(std::unique_ptr<Link> link_in, uint32_t batch_in, py::object owner_in = py::object())
      : owner(std::move(owner_in)),
        link(std::move(link_in)),
        batch(batch_in),
        ring(*link, {.batch = batch_in}) {}
  py::object owner;  // what must outlive the link, if Python has it
  std::unique_ptr<Link> link;
  uint32_t batch;
  WorkRing ring;
};

TrafficClass traffic_class_from(const std::string& name);
py::dict to_dict(const WorkRingCounters& counters);
py::dict to_dict(const LinkAttributes& attributes);

// Raises the Python exception for an outcome; see module.cc.
[[noreturn]] void raise_outcome(const Outcome& outcome);

}  // namespace kvtransfer::python
