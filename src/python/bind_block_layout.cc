#include "bind.h"
#include "kvtransfer/block_layout.h"

namespace kvtransfer::python {

void bind_block_layout(py::module_& m) {
  py::class_<BlockLayout>(m, "BlockLayout",
                          "Where each byte of a Full Block lies: layers, planes, tokens.")
      .def(py::init<uint32_t, uint32_t, std::vector<uint32_t>>(), py::arg("num_layers"),
           py::arg("block_tokens"), py::arg("plane_bytes"),
           "Every layer alike; plane_bytes[p] is what plane p stores per token.")
      .def_static(
          "per_layer",
          [](uint32_t block_tokens, std::vector<std::vector<uint32_t>> layers) {
            return BlockLayout(block_tokens, std::move(layers));
          },
          py::arg("block_tokens"), py::arg("layers"), "layers[l][p] bytes per token.")
      .def_property_readonly("num_layers", &BlockLayout::num_layers)
      .def_property_readonly("block_tokens", &BlockLayout::block_tokens)
      .def_property_readonly("full_block_bytes", &BlockLayout::full_block_bytes)
      .def_property_readonly("bytes_per_token", &BlockLayout::bytes_per_token)
      .def_property_readonly("digest", &BlockLayout::digest)
      .def("layer_offset",
           [](const BlockLayout& self, uint32_t layer) {
             if (layer > self.num_layers()) throw py::index_error("layer out of range");
             return self.layer_offset(layer);
           })
      .def("layer_bytes",
           [](const BlockLayout& self, uint32_t layer) {
             if (layer >= self.num_layers()) throw py::index_error("layer out of range");
             return self.layer_bytes(layer);
           })
      .def("cut_layers", &BlockLayout::cut_layers, py::arg("parts"), py::arg("alignment") = 4096)
      .def("__eq__", &BlockLayout::operator==)
      .def("__repr__",
           [](const BlockLayout& self) { return "BlockLayout(" + self.to_string() + ")"; })
      .def("__str__", &BlockLayout::to_string);
}

}  // namespace kvtransfer::python
