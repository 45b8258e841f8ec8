#include "bind.h"
#include "kvtransfer/io_queue.h"

namespace kvtransfer::python {

// Only the choice of a twin is visible from Python; files are moved by the traffic manager.
void bind_io_queue(py::module_& m) {
  py::enum_<IoBackend>(m, "IoBackend")
      .value("auto", IoBackend::kAuto)
      .value("uring", IoBackend::kUring)
      .value("threads", IoBackend::kThreads);
  m.def(
      "probe_io",
      [](IoBackend backend) {
        const auto queue = IoQueue::create({.backend = backend, .depth = 4});
        return py::make_tuple(std::string(queue->backend()), queue->fallback_reason());
      },
      py::arg("backend") = IoBackend::kAuto,
      "(backend that would run, why not the better one or '').");
  m.def(
      "io_features",
      [](IoBackend backend) {
        return IoQueue::create({.backend = backend, .depth = 4})->features();
      },
      py::arg("backend") = IoBackend::kAuto, "What of newer kernels that backend uses.");
}

}  // namespace kvtransfer::python
