#include "python_hooks/nn_modules/places/array_contents.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

namespace eagercache {
namespace {

namespace py = pybind11;

bool equal(const std::vector<Py_ssize_t>& expected, const Py_ssize_t* now) noexcept {
  return expected.empty() || (now != nullptr && std::equal(expected.begin(), expected.end(), now));
}

}  // namespace

ArrayContents::ArrayContents(const py::tuple& row)
    : type_(row[0]),
      format_(py::cast<std::string>(row[1])),
      shape_(py::cast<std::vector<Py_ssize_t>>(row[2])),
      strides_(py::cast<std::vector<Py_ssize_t>>(row[3])),
      bytes_(py::cast<std::string>(row[4])) {}

bool ArrayContents::are_of(PyObject* object) const noexcept {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) {
    return false;
  }
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool same = view.readonly == 0 && view.len == static_cast<Py_ssize_t>(bytes_.size()) &&
                    view.ndim == static_cast<int>(shape_.size()) && view.format != nullptr &&
                    format_ == view.format && equal(shape_, view.shape) &&
                    equal(strides_, view.strides) &&
                    std::memcmp(view.buf, bytes_.data(), bytes_.size()) == 0;
  PyBuffer_Release(&view);
  return same;
}

}  // namespace eagercache
