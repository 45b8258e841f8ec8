#include "bind.h"
#include "kvtransfer/layer_stream.h"

namespace kvtransfer::python {

void bind_layer_stream(py::module_& m) {
  py::class_<LayerStream, std::shared_ptr<LayerStream>>(
      m, "LayerStream", "Per layer a count of what has arrived; the fence a forward waits on.")
      .def(py::init([](uint32_t num_layers, uint32_t expected) {
             return std::make_shared<LayerStream>(num_layers, expected);
           }),
           py::arg("num_layers"), py::arg("expected") = 1)
      .def_property_readonly_static("UNKNOWN",
                                    [](const py::object&) { return LayerStream::kUnknown; })
      .def_property_readonly("num_layers", &LayerStream::num_layers)
      .def("set_expected", &LayerStream::set_expected, py::arg("expected"))
      .def("arrive", &LayerStream::arrive, py::arg("layer"), py::arg("count") = 1)
      .def("publish", &LayerStream::publish, py::arg("layer"))
      .def("arrived",
           [](const LayerStream& self, uint32_t layer) {
             if (layer >= self.num_layers()) throw py::index_error("layer out of range");
             return self.arrived(layer);
           })
      .def("ready",
           [](const LayerStream& self, uint32_t layer) {
             if (layer >= self.num_layers()) throw py::index_error("layer out of range");
             return self.ready(layer);
           })
      .def(
          "wait",
          [](LayerStream& self, uint32_t layer, double timeout_s) {
            if (layer >= self.num_layers()) throw py::index_error("layer out of range");
            WaitResult result;
            {
              const py::gil_scoped_release release;
              result = self.wait(layer, deadline_from(timeout_s));
            }
            if (result == WaitResult::kFailed) raise_outcome(self.failure());
            if (result == WaitResult::kTimeout) {
              raise_outcome({ErrorCode::kTimeout, 0,
                             "layer " + std::to_string(layer) + " of " +
                                 std::to_string(self.num_layers()) + " not ready within " +
                                 std::to_string(timeout_s) + " s (" +
                                 std::to_string(self.arrived(layer)) + " arrivals)"});
            }
          },
          py::arg("layer"), py::arg("timeout_s"),
          "Blocks, without the GIL, until the layer is ready. Raises TransferTimeout at the "
          "deadline, or the error the stream failed with.")
      .def("fail",
           [](LayerStream& self, const std::string& text) {
             self.fail({ErrorCode::kCancelled, 0, text});
           })
      .def_property_readonly("failed", &LayerStream::failed)
      .def_property_readonly("failure",
                             [](const LayerStream& self) -> py::object {
                               if (!self.failed()) return py::none();
                               const Outcome why = self.failure();
                               return py::make_tuple(std::string(error_code_name(why.code)),
                                                     why.text);
                             })
      .def("stall_seconds", [](const LayerStream& self, uint32_t layer) {
        if (layer >= self.num_layers()) throw py::index_error("layer out of range");
        return static_cast<double>(self.stall_ns(layer)) * 1e-9;
      });
}

}  // namespace kvtransfer::python
