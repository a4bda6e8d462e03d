#pragma once

// Whether the values that a module's forward reads beside its tensors are what they were. Owned by
// guards and records. Under the GIL.

#include <pybind11/pybind11.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "python_hooks/nn_modules/places/array_contents.h"

namespace eagercache {

// Values that a module's forward reads beside its tensors and arguments, where they are kept:
// namespaces, classes, objects' dictionaries, lists, cells of closures. A kernel holds them as they
// were when it was traced; same() says whether they still are.
//
// Everything needs the GIL. Holds references to the places and to plain values, functions and
// classes; of other values to their type alone, so that no tensor or module is kept alive.
class ModuleValues {
 public:
  ModuleValues() = default;
  ModuleValues(const ModuleValues&) = delete;
  ModuleValues& operator=(const ModuleValues&) = delete;

  // Adds what modules/watched_rows.py has collected, rows of (sort, place, keys, expected):
  //   ("items", dict or class, keys, values)  those keys have those values;
  //   ("dict", dict, keys, values)            that is all there is, in that order;
  //   ("list", list, (), values)              the same, of a list;
  //   ("tuple", tuple, (), values)            the same, of a tuple, whose items may be arrays;
  //   ("set", set, (), values)                the same, of a set;
  //   ("cell", cell, (), (value,))            what a closure has;
  //   ("class", class, (), ())                nothing was assigned to it or to a base, and its
  //   name;
  //   ("function", function, (), parts)       its code, defaults, name and documentation;
  //   ("type", object, (), (class,))          the object's class;
  //   ("slots", object, names, values)        those slots of it have those values.
  // A value is (object, by_type): by_type stands for any object of the type `object`, and a None
  // with it for a key that is not there. (contents, None) stands for an array that holds these, as
  // `ArrayContents` takes them. Throws std::invalid_argument for anything else.
  void add(const pybind11::list& rows);

  // Whether all are as they were added. Runs no Python code. About 10 ns a value, and
  // more of an array, whose bytes are compared.
  bool same() const noexcept;
  // Whether something in that dict, or its being that dict, is among them.
  bool watches(PyObject* container) const noexcept { return containers_.contains(container); }

 private:
  enum class Sort { kItems, kDict, kList, kTuple, kSet, kCell, kClass, kFunction, kType, kSlots };
  struct Expected {
    pybind11::object object;
    bool by_type = false;
    std::shared_ptr<const ArrayContents> contents = nullptr;
    bool matches(PyObject* now) const noexcept;
  };
  struct Place {
    Sort sort = Sort::kItems;
    pybind11::object kept;
    PyObject* container = nullptr;  // a class's dictionary, or `kept`
    std::vector<pybind11::object> keys;
    std::vector<Expected> values;
    std::vector<Py_ssize_t> offsets;        // of slots
    unsigned int type_version = 0;          // of a class
    pybind11::object name, qualified_name;  // of a class
  };

  static Place place_of(const pybind11::tuple& row);
  static bool holds(const Place& place) noexcept;
  static bool is_whole_dict(const Place& place) noexcept;
  static bool has_order(const Place& place) noexcept;
  static bool has_items(const Place& place) noexcept;
  static bool has_members(const Place& place) noexcept;

  std::vector<Place> places_;
  std::unordered_set<PyObject*> containers_;  // of those places
};

// A type gets a version when a name is looked up in it, and another one when something is assigned
// to it or to a base. 0 where it cannot have one. Throws py::error_already_set.
unsigned int version_of(PyTypeObject* type);

}  // namespace eagercache
