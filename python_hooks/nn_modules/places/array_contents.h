#pragma once

// What an array of numpy held when it was looked at. Under the GIL.

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace eagercache {

// The bytes of an array and how they are laid out. Holds its type, and not the array: a program may
// resize one that nobody else refers to.
class ArrayContents {
 public:
  // `row`: (type, format, shape, strides, bytes) of a memoryview over a contiguous array that may
  // be written. The type's objects are asked for their buffers, which must run no Python code.
  // Throws pybind11's errors for anything else.
  explicit ArrayContents(const pybind11::tuple& row);

  // Whether `object` is such an array with the same bytes. Runs no Python code, allocates what its
  // type does for a buffer.
  bool are_of(PyObject* object) const noexcept;

 private:
  pybind11::object type_;
  std::string format_;
  std::vector<Py_ssize_t> shape_;
  std::vector<Py_ssize_t> strides_;
  std::string bytes_;
};

}  // namespace eagercache
