#include "python_hooks/nn_modules/places/values.h"

#include <structmember.h>

#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace eagercache {
namespace {

namespace py = pybind11;

// Of one type whose comparison runs no Python code.
bool equal_plain(PyObject* left, PyObject* right) noexcept {
  if (Py_TYPE(left) != Py_TYPE(right)) {
    return false;
  }
  if (PyFloat_CheckExact(left)) {
    // By their bits: 0.0 is not -0.0, and NaN is itself.
    return std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(left)) ==
           std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(right));
  }
  if (!PyLong_CheckExact(left) && !PyUnicode_CheckExact(left) && !PyBytes_CheckExact(left)) {
    return false;
  }
  const int equal = PyObject_RichCompareBool(left, right, Py_EQ);
  if (equal < 0) {
    PyErr_Clear();
  }
  return equal == 1;
}

// The parts of a function that may be replaced, in the order of watched_rows.py. None for nothing.
PyObject* part_of(PyObject* function, std::size_t index) noexcept {
  const auto* held = reinterpret_cast<PyFunctionObject*>(function);
  PyObject* const parts[] = {held->func_code, held->func_defaults, held->func_kwdefaults,
                             held->func_name, held->func_qualname, held->func_doc};
  return parts[index] == nullptr ? Py_None : parts[index];
}
constexpr std::size_t kFunctionParts = 6;

// Where slots of an object are in it. Throws std::invalid_argument for a name that is no slot's,
// py::error_already_set.
std::vector<Py_ssize_t> offsets_of(const py::object& object, const py::object& names) {
  std::vector<Py_ssize_t> offsets;
  for (const py::handle& name : names) {
    const py::object found = py::type::of(object).attr(name);
    if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) {
      throw std::invalid_argument("no slot");
    }
    const auto* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
    if (member->d_member->type != T_OBJECT_EX ||
        PyType_IsSubtype(Py_TYPE(object.ptr()), member->d_common.d_type) == 0) {
      throw std::invalid_argument("no slot of an object");
    }
    offsets.push_back(member->d_member->offset);
  }
  return offsets;
}

const PyHeapTypeObject* heap_type(PyObject* type) noexcept {
  return PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type), Py_TPFLAGS_HEAPTYPE)
             ? reinterpret_cast<PyHeapTypeObject*>(type)
             : nullptr;
}

}  // namespace

bool ModuleValues::Expected::matches(PyObject* now) const noexcept {
  if (contents != nullptr) {
    return now != nullptr && contents->are_of(now);
  }
  if (by_type) {
    return object.is_none()
               ? now == nullptr
               : now != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(now)) == object.ptr();
  }
  return now == object.ptr() || (now != nullptr && equal_plain(now, object.ptr()));
}

unsigned int version_of(PyTypeObject* type) {
  static PyObject* const kName = PyUnicode_InternFromString("__init__");
  if (type->tp_version_tag == 0) {
    PyObject* found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), kName);
    if (found == nullptr) {
      throw py::error_already_set();
    }
    Py_DECREF(found);
  }
  return type->tp_version_tag;
}

ModuleValues::Place ModuleValues::place_of(const py::tuple& row) {
  const auto sort = py::cast<std::string>(row[0]);
  Place place;
  place.kept = row[1];
  PyObject* const object = place.kept.ptr();
  place.container = object;
  bool fits = false;
  if (sort == "items") {
    place.sort = Sort::kItems;
    if (PyType_Check(object)) {
      place.container = reinterpret_cast<PyTypeObject*>(object)->tp_dict;
    }
    fits = place.container != nullptr && PyDict_Check(place.container);
  } else if (sort == "dict") {
    place.sort = Sort::kDict;
    fits = PyDict_Check(object);
  } else if (sort == "list") {
    place.sort = Sort::kList;
    fits = PyList_Check(object);
  } else if (sort == "tuple") {
    place.sort = Sort::kTuple;
    fits = PyTuple_Check(object);
  } else if (sort == "set") {
    place.sort = Sort::kSet;
    fits = PyAnySet_Check(object);
  } else if (sort == "cell") {
    place.sort = Sort::kCell;
    fits = PyCell_Check(object) && py::len(row[3]) == 1;
  } else if (sort == "class") {
    place.sort = Sort::kClass;
    fits = PyType_Check(object);
  } else if (sort == "function") {
    place.sort = Sort::kFunction;
    fits = PyFunction_Check(object) && py::len(row[3]) == kFunctionParts;
  } else if (sort == "type") {
    place.sort = Sort::kType;
    fits = py::len(row[3]) == 1;
  } else if (sort == "slots") {
    place.sort = Sort::kSlots;
    place.offsets = offsets_of(place.kept, row[2]);
    fits = true;
  }
  if (!fits) {
    throw std::invalid_argument("no place of values: " + sort);
  }
  if (place.sort == Sort::kClass) {
    place.type_version = version_of(reinterpret_cast<PyTypeObject*>(object));
    if (const PyHeapTypeObject* heap = heap_type(object)) {
      place.name = py::reinterpret_borrow<py::object>(heap->ht_name);
      place.qualified_name = py::reinterpret_borrow<py::object>(heap->ht_qualname);
    }
  }
  return place;
}

void ModuleValues::add(const py::list& rows) {
  for (const py::handle& item : rows) {
    const auto row = py::cast<py::tuple>(item);
    Place place = place_of(row);
    for (const py::handle& key : row[2]) {
      place.keys.push_back(py::reinterpret_borrow<py::object>(key));
    }
    for (const py::handle& value : row[3]) {
      const auto pair = py::cast<py::tuple>(value);
      if (pair[1].is_none()) {
        const auto contents = py::cast<py::tuple>(pair[0]);
        place.values.push_back({py::none(), false, std::make_shared<ArrayContents>(contents)});
      } else {
        place.values.push_back({pair[0], py::cast<bool>(pair[1])});
      }
    }
    const bool keyed =
        place.sort == Sort::kItems || place.sort == Sort::kDict || place.sort == Sort::kSlots;
    if (place.keys.size() != (keyed ? place.values.size() : 0)) {
      throw std::invalid_argument("as many keys as values are needed");
    }
    containers_.insert(place.container);
    places_.push_back(std::move(place));
  }
}

bool ModuleValues::is_whole_dict(const Place& place) noexcept {
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (std::size_t i = 0; i < place.keys.size(); ++i) {
    if (PyDict_Next(place.container, &position, &key, &value) == 0) {
      return false;
    }
    PyObject* const expected = place.keys[i].ptr();
    if ((key != expected && !equal_plain(key, expected)) || !place.values[i].matches(value)) {
      return false;
    }
  }
  return true;
}

bool ModuleValues::has_order(const Place& place) noexcept {
  // An OrderedDict keeps its order beside the dict in it.
  PyObject* const keys = PyODict_Type.tp_iter(place.container);
  bool same = keys != nullptr;
  for (std::size_t i = 0; same && i < place.keys.size(); ++i) {
    PyObject* const key = Py_TYPE(keys)->tp_iternext(keys);
    same = key != nullptr && (key == place.keys[i].ptr() || equal_plain(key, place.keys[i].ptr()));
    Py_XDECREF(key);
  }
  Py_XDECREF(keys);
  if (PyErr_Occurred() != nullptr) {  // it changed meanwhile
    PyErr_Clear();
    return false;
  }
  return same;
}

bool ModuleValues::has_items(const Place& place) noexcept {
  for (std::size_t i = 0; i < place.keys.size(); ++i) {
    PyObject* now = PyDict_GetItemWithError(place.container, place.keys[i].ptr());
    if (now == nullptr) {
      PyErr_Clear();
    }
    if (!place.values[i].matches(now)) {
      return false;
    }
  }
  return true;
}

bool ModuleValues::has_members(const Place& place) noexcept {
  // In their order, which a loop over the set sees. A set's own iterator, whatever a subclass has:
  // it runs no Python code, where a look-up would call __eq__ and would take True for 1.
  PyObject* const members = PySet_Type.tp_iter(place.container);
  if (members == nullptr) {
    PyErr_Clear();
    return false;
  }
  bool same = true;
  std::size_t i = 0;
  while (PyObject* const member = Py_TYPE(members)->tp_iternext(members)) {
    same = same && i < place.values.size() && place.values[i].matches(member);
    ++i;
    Py_DECREF(member);
  }
  if (PyErr_Occurred() != nullptr) {  // it changed meanwhile
    PyErr_Clear();
    same = false;
  }
  Py_DECREF(members);
  return same && i == place.values.size();
}

bool ModuleValues::holds(const Place& place) noexcept {
  const auto size = static_cast<Py_ssize_t>(place.values.size());
  switch (place.sort) {
    case Sort::kItems:
      return has_items(place);
    case Sort::kDict:
      return PyDict_GET_SIZE(place.container) == size &&
             (PyODict_Check(place.container) ? has_order(place) && has_items(place)
                                             : is_whole_dict(place));
    case Sort::kList:
      if (PyList_GET_SIZE(place.container) != size) {
        return false;
      }
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (!place.values[static_cast<std::size_t>(i)].matches(
                PyList_GET_ITEM(place.container, i))) {
          return false;
        }
      }
      return true;
    case Sort::kTuple:
      if (PyTuple_GET_SIZE(place.container) != size) {
        return false;
      }
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (!place.values[static_cast<std::size_t>(i)].matches(
                PyTuple_GET_ITEM(place.container, i))) {
          return false;
        }
      }
      return true;
    case Sort::kSet:
      return PySet_GET_SIZE(place.container) == size && has_members(place);
    case Sort::kCell:
      return place.values[0].matches(PyCell_GET(place.container));
    case Sort::kClass: {
      const PyHeapTypeObject* heap = heap_type(place.container);
      return reinterpret_cast<PyTypeObject*>(place.container)->tp_version_tag ==
                 place.type_version &&
             (heap == nullptr || (heap->ht_name == place.name.ptr() &&
                                  heap->ht_qualname == place.qualified_name.ptr()));
    }
    case Sort::kFunction:
      for (std::size_t i = 0; i < place.values.size(); ++i) {
        if (part_of(place.container, i) != place.values[i].object.ptr()) {
          return false;
        }
      }
      return true;
    case Sort::kType:
      return reinterpret_cast<PyObject*>(Py_TYPE(place.container)) == place.values[0].object.ptr();
    case Sort::kSlots:
      for (std::size_t i = 0; i < place.offsets.size(); ++i) {
        const char* const start = reinterpret_cast<const char*>(place.container);
        if (!place.values[i].matches(
                *reinterpret_cast<PyObject* const*>(start + place.offsets[i]))) {
          return false;
        }
      }
      return true;
  }
  return false;
}

bool ModuleValues::same() const noexcept {
  for (const Place& place : places_) {
    if (!holds(place)) {
      return false;
    }
  }
  return true;
}

}  // namespace eagercache
