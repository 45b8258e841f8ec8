#include "bind.h"
#include "kvtransfer/buffer_pool.h"

namespace kvtransfer::python {

void bind_buffer_pool(py::module_& m) {
  py::class_<BufferPool, std::shared_ptr<BufferPool>>(
      m, "BufferPool", "The PE or DE buffer: lock-free, all-or-nothing, reference-counted slots.")
      .def(py::init<std::shared_ptr<MemoryRegion>, uint32_t, uint64_t>(), py::arg("region"),
           py::arg("header_bytes"), py::arg("payload_bytes"))
      .def_static("slot_bytes_for",
                  [](uint32_t header_bytes, uint64_t payload_bytes) {
                    return BufferPool::slot_bytes(header_bytes, payload_bytes);
                  })
      .def(
          "acquire",
          [](BufferPool& self, uint32_t count) -> py::object {
            std::vector<uint32_t> slots(std::min(count, self.num_slots()));
            if (count > self.num_slots() || !self.acquire(slots)) return py::none();
            return to_array(slots);
          },
          py::arg("count"), "Array of `count` slots, or None if that many aren't free.")
      .def(
          "release",
          [](BufferPool& self, const Array<uint32_t>& slots) {
            for (py::ssize_t i = 0; i < slots.size(); ++i) {
              if (!self.release(slots.data()[i])) {
                throw Error(ErrorCode::kInvalidArgument,
                            "BufferPool: slot " + std::to_string(slots.data()[i]) + " is not held");
              }
            }
          },
          py::arg("slots"))
      .def(
          "payload_offsets",
          [](const BufferPool& self, const Array<uint32_t>& slots) {
            std::vector<uint64_t> offsets;
            for (py::ssize_t i = 0; i < slots.size(); ++i) {
              if (slots.data()[i] >= self.num_slots()) throw py::index_error("slot out of range");
              offsets.push_back(self.payload_offset(slots.data()[i]));
            }
            return to_array(offsets);
          },
          py::arg("slots"), "Byte offset in the region of each slot's Full Block.")
      .def_property_readonly("region", &BufferPool::region)
      .def_property_readonly("num_slots", &BufferPool::num_slots)
      .def_property_readonly("available", &BufferPool::available)
      .def_property_readonly("low_watermark", &BufferPool::low_watermark)
      .def_property_readonly("bad_releases", &BufferPool::bad_releases)
      .def_property_readonly("slot_bytes",
                             [](const BufferPool& self) { return self.slot_bytes(); });
}

}  // namespace kvtransfer::python
