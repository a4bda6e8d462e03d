#pragma once

// Python objects among the arguments of a module's call (a cache of keys and values, for one):
// whose instances can be read, and copies of them. An object that can be read is all in its
// `__dict__`, in slots, or in the items of a named tuple: its class is Python's own, and runs no
// code when an attribute is read, nor when one is set, unless no forward may set one
// (`is_open_class`). Under the GIL.

#include <pybind11/pybind11.h>

#include <span>

#include "python_hooks/nn_modules/object_classes.h"

namespace eagercache {

// What an instance of an open class holds, by name: of a `__dict__` in its order, of a named tuple
// in that of its items, of slots in that of their names, those of bases first. Nothing is owned.
class Fields {
 public:
  explicit Fields(PyObject* object) noexcept;

  // False for a named tuple of another length, for an output of transformers that does not hold
  // those of its attributes that are not None and nothing else, and where memory ran out.
  bool readable() const noexcept { return readable_; }
  PyObject* class_name() const noexcept { return class_name_; }  // see object_classes.h
  Py_ssize_t size() const noexcept { return size_; }
  // What a forward would write to: the `__dict__`, or the object.
  PyObject* place() const noexcept { return attributes_ != nullptr ? attributes_ : object_; }
  // The next one; false, and nothing, after the last.
  bool next(PyObject** name, PyObject** value) noexcept;

 private:
  PyObject* object_;
  PyObject* attributes_ = nullptr;
  PyObject* class_name_ = nullptr;
  std::span<const pybind11::object> names_;
  std::span<const Py_ssize_t> offsets_;
  Py_ssize_t size_ = 0;
  Py_ssize_t position_ = 0;
  bool readable_ = false;
};

// `value` with copies in the place of its lists, tuples, dicts, objects of open classes and small
// tensors of integers, which share other tensors and whatever else they lead to with it. Throws
// py::error_already_set, std::bad_alloc.
pybind11::object copy_of_objects(const pybind11::handle& value);

// `value` with such copies of its containers and objects, and with `...`, which is no argument of a
// call, in the place of some of its tensors: counted from `*next` on in the order of
// read_arguments, those whose numbers are in `dropped` (ascending). Throws as copy_of_objects.
pybind11::object without_tensors(const pybind11::handle& value,
                                 std::span<const std::size_t> dropped, std::size_t* next);

}  // namespace eagercache
