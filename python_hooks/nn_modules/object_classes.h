#pragma once

// What is known of the classes of objects among the arguments of a module's call: found out once
// for each, and kept as long as the process. Under the GIL.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace eagercache {

// Where what an instance holds is.
enum class Held : std::uint8_t {
  kNowhere,     // not, or not all of it, where it can be read without running code
  kAttributes,  // in its `__dict__`
  kItems,       // a named tuple's
  kSlots,
};

struct KnownClass {
  pybind11::object kept;     // the class, so that no other one gets its address
  PyObject* name = nullptr;  // "module.Class", a str
  Held held = Held::kNowhere;
  bool is_fixed = false;  // a frozen dataclass, a named tuple or an output of transformers
  std::vector<pybind11::object> fields;  // of items and slots: their names
  std::vector<Py_ssize_t> offsets;       // of slots: where they are in an instance
};

// nullptr, without an exception, where another class of this process has the same name: the one
// that its module has under it, or the first.
const KnownClass* known_class(PyTypeObject* type) noexcept;

// Lets other classes have the names of those that are known: of a process that makes the classes of
// another one's call anew for each. Kernels of the calls before it know their objects no more.
void forget_object_classes();

// "module.Class" of a class, a str that lives as long as the process: the same in every process.
// nullptr, without an exception, where another class of this process has that name. Keeps the
// class.
PyObject* class_name(PyTypeObject* type) noexcept;

// "module.Class.NAME" of a member of an enum, which is one object for ever; likewise. nullptr,
// without an exception, for anything else.
PyObject* member_name(PyObject* object) noexcept;

// Whether all that an instance holds can be read by `Fields`, and reading or setting it runs no
// code; or the class is a named tuple, a frozen dataclass, or an output of transformers (a dict of
// its own fields), whose instances are inputs that a kernel never changes.
bool is_open_class(PyTypeObject* type) noexcept;

}  // namespace eagercache
