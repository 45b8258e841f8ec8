// The table of contents of kvtransfer._core, and the mapping of errors to Python exceptions.
#include "bind.h"

namespace kvtransfer::python {

namespace {

// The exception tree lives in kvtransfer/errors.py; a code's class is looked up there by its word.
void raise_code(ErrorCode code, int sys_errno, const std::string& text) {
  const py::object make = py::module_::import("kvtransfer.errors").attr("from_code");
  const py::object error = make(std::string(error_code_name(code)), sys_errno, text);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    raise_code(error.code(), error.sys_errno(), error.what());
  }
}

}  // namespace

void raise_outcome(const Outcome& outcome) {
  raise_code(outcome.code, outcome.sys_errno, outcome.text);
  throw py::error_already_set();
}

}  // namespace kvtransfer::python

PYBIND11_MODULE(_core, m) {
  using namespace kvtransfer::python;
  m.doc() = "The C++ core of kvtransfer. Private: use the modules of the package.";
  py::register_exception_translator(&translate);
  bind_block_layout(m);
  bind_paged_cache(m);
  bind_memory_region(m);
  bind_buffer_pool(m);
  bind_io_queue(m);
  bind_block_store(m);
  bind_layer_stream(m);
  bind_work_ring(m);
  bind_verbs(m);
  bind_traffic_manager(m);
}
