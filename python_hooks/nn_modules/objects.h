#pragma once

// Python objects among the arguments of a module's call (a cache of keys and values, for one):
// whose instances can be read, and copies of them. An object that can be read is all in its
// `__dict__`: its class is Python's own, has no slots, and runs no code when an attribute is read,
// nor when one is set, unless no forward may set one (`is_open_class`). Under the GIL.

#include <pybind11/pybind11.h>

namespace eagercache {

// "module.Class" of a class, a str that lives as long as the process: the same in every process.
// nullptr, without an exception, where another class of this process has that name. Keeps the
// class.
PyObject* class_name(PyTypeObject* type) noexcept;

// Whether all that an instance holds is in its `__dict__`, and reading or setting it runs no code;
// or the class is a frozen dataclass, or an output of transformers (a dict of its own fields, see
// `holds_its_fields`), whose instances are inputs that a kernel never changes.
bool is_open_class(PyTypeObject* type) noexcept;

// The `__dict__` of an instance of an open class; nullptr, without an exception, where there is no
// memory for it. Lives as long as the object.
PyObject* attributes_of(PyObject* object) noexcept;

// Whether an object of an open class is no dict, or holds those of its attributes that are not None
// and nothing else, in their order. `attributes`: of `attributes_of`.
bool holds_its_fields(PyObject* object, PyObject* attributes) noexcept;

// `value` with copies in the place of its lists, tuples, dicts, objects of open classes and small
// tensors of integers, which share other tensors and whatever else they lead to with it. Throws
// py::error_already_set, std::bad_alloc.
pybind11::object copy_of_objects(const pybind11::handle& value);

}  // namespace eagercache
