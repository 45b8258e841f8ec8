#include "bind.h"
#include "kvtransfer/memory_region.h"

namespace kvtransfer::python {

void bind_memory_region(py::module_& m) {
  py::enum_<RegionKind>(m, "RegionKind")
      .value("anonymous", RegionKind::kAnonymous)
      .value("shared", RegionKind::kShared);
  py::enum_<HugePages>(m, "HugePages")
      .value("off", HugePages::kOff)
      .value("auto", HugePages::kAuto)
      .value("required", HugePages::kRequired);
  py::class_<MemoryRegion, std::shared_ptr<MemoryRegion>>(
      m, "MemoryRegion", "Page-aligned, pre-faulted host memory at one address for life.")
      .def(py::init<size_t, RegionKind, HugePages>(), py::arg("num_bytes"),
           py::arg("kind") = RegionKind::kShared, py::arg("huge_pages") = HugePages::kAuto)
      .def_property_readonly("num_bytes", &MemoryRegion::bytes)
      .def_property_readonly("page_bytes", &MemoryRegion::page_bytes)
      .def_property_readonly("fd", &MemoryRegion::fd)
      .def(
          "array",
          [](py::object self) {
            const auto& region = self.cast<const MemoryRegion&>();
            // The array keeps the region alive.
            return py::array_t<uint8_t>(static_cast<py::ssize_t>(region.bytes()), region.data(),
                                        self);
          },
          "A writable uint8 view of the whole region (no copy).");
}

}  // namespace kvtransfer::python
