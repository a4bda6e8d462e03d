#include "python_hooks/nn_modules/object_classes.h"

#include <structmember.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace eagercache {
namespace {

namespace py = pybind11;

// abc.ABC stands for all classes that Python code defines: how they end, and the one metaclass
// beside `type` that does nothing to instances. Never freed.
PyTypeObject* plain_class() {
  static auto* const type = reinterpret_cast<PyTypeObject*>(
      py::module_::import("abc").attr("ABC").cast<py::object>().release().ptr());
  return type;
}

// The names of the slots that a class adds; nullptr where it adds none.
PyObject* slots_of(PyTypeObject* type) noexcept {
  if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
    return nullptr;
  }
  PyObject* slots = reinterpret_cast<PyHeapTypeObject*>(type)->ht_slots;
  return slots != nullptr && PyTuple_GET_SIZE(slots) > 0 ? slots : nullptr;
}

bool has_slots(PyTypeObject* type) noexcept {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    if (slots_of(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i))) != nullptr) {
      return true;
    }
  }
  return false;
}

// Whether the fields of a named tuple are its items, in order: each name stands for the getter of
// one that collections.namedtuple makes.
bool names_items(const py::object& type, std::vector<py::object>& fields) {
  const py::object names = py::getattr(type, "_fields", py::none());
  if (!PyTuple_CheckExact(names.ptr())) {
    return false;
  }
  const py::object getter = py::module_::import("_collections").attr("_tuplegetter");
  for (const py::handle name : names) {
    const py::object found = py::getattr(type, name, py::none());
    if (!PyUnicode_CheckExact(name.ptr()) || !py::type::of(found).is(getter) ||
        py::cast<std::size_t>(found.attr("__reduce__")()[py::int_(1)][py::int_(0)]) !=
            fields.size()) {
      return false;
    }
    fields.push_back(py::reinterpret_borrow<py::object>(name));
  }
  return true;
}

// Whether every slot of an instance is read under its name; those of bases come first.
bool names_slots(const py::object& type, KnownClass& known) {
  PyObject* const bases = reinterpret_cast<PyTypeObject*>(type.ptr())->tp_mro;
  for (Py_ssize_t i = PyTuple_GET_SIZE(bases) - 1; i >= 0; --i) {
    auto* const base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
    PyObject* const slots = slots_of(base);
    for (Py_ssize_t at = 0; slots != nullptr && at < PyTuple_GET_SIZE(slots); ++at) {
      const auto name = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(slots, at));
      const py::object found = py::getattr(type, name, py::none());
      if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) {
        return false;
      }
      const auto* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
      if (member->d_common.d_type != base || member->d_member->type != T_OBJECT_EX ||
          PyUnicode_Compare(member->d_common.d_name, name.ptr()) != 0) {
        return false;
      }
      known.fields.push_back(name);
      known.offsets.push_back(member->d_member->offset);
    }
  }
  return true;
}

// By the name that transformers has for it; its classes are dataclasses and OrderedDicts.
bool is_model_output(const py::object& type) {
  for (const py::handle base : type.attr("__mro__")) {
    if (py::cast<std::string>(base.attr("__name__")) == "ModelOutput" &&
        py::cast<std::string>(base.attr("__module__")) == "transformers.utils.generic") {
      return true;
    }
  }
  return false;
}

bool is_frozen(const py::object& type) {
  const py::object parameters = py::getattr(type, "__dataclass_params__", py::none());
  return !parameters.is_none() && py::cast<bool>(parameters.attr("frozen"));
}

// With `output` or `items`, OrderedDict's or tuple's part of an instance is known besides.
bool is_python_class(PyTypeObject* type, bool output, bool items) {
  PyTypeObject* const plain = plain_class();
  if (Py_TYPE(type) != &PyType_Type && Py_TYPE(type) != Py_TYPE(plain)) {
    return false;
  }
  PyObject* const bases = type->tp_mro;
  if (bases == nullptr) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
    if (base == &PyBaseObject_Type || (items && base == &PyTuple_Type) ||
        (output && (base == &PyODict_Type || base == &PyDict_Type))) {
      continue;
    }
    // A type that C code made ends otherwise.
    if (!PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE) || base->tp_dealloc != plain->tp_dealloc) {
      return false;
    }
  }
  return true;
}

Held find_held(const py::object& object, bool output, KnownClass& known) {
  auto* const type = reinterpret_cast<PyTypeObject*>(object.ptr());
  const bool items = PyType_IsSubtype(type, &PyTuple_Type) != 0;
  if (!is_python_class(type, output, items)) {
    return Held::kNowhere;
  }
  if (items) {
    const bool all = type->tp_dictoffset == 0 && !has_slots(type);
    return all && names_items(object, known.fields) ? Held::kItems : Held::kNowhere;
  }
  if (!has_slots(type)) {
    return type->tp_dictoffset != 0 ? Held::kAttributes : Held::kNowhere;
  }
  const bool all = type->tp_dictoffset == 0 && !output;
  return all && names_slots(object, known) ? Held::kSlots : Held::kNowhere;
}

// The classes that were met. What was known of one lasts: somebody may read an object by it.
struct Classes {
  std::unordered_map<PyTypeObject*, std::unique_ptr<KnownClass>> known;
  std::unordered_map<std::string, PyTypeObject*> names;
  std::vector<std::unique_ptr<KnownClass>> former;

  static Classes& all() {
    static auto* const classes = new Classes();
    return *classes;
  }
};

// Whether a class is what its module has under its name now.
bool is_found_by_name(const py::object& type) {
  const py::dict modules = py::module_::import("sys").attr("modules");
  py::object found = modules.attr("get")(type.attr("__module__"));
  const py::list path = type.attr("__qualname__").attr("split")(".");
  for (const py::handle part : path) {
    found = py::getattr(found, part, py::none());
  }
  return found.is(type);
}

// Whether the name is this class's from now on. A class that is defined anew, as by a notebook's
// cell that is run again, takes it from the former one.
bool takes_name(const std::string& text, PyTypeObject* type, const py::object& object) {
  Classes& all = Classes::all();
  PyTypeObject*& owner = all.names.emplace(text, type).first->second;
  if (owner == type) {
    return true;
  }
  if (!is_found_by_name(object)) {
    return false;
  }
  all.former.push_back(std::move(all.known[owner]));
  owner = type;
  return true;
}

// nullptr where another class has the name.
const KnownClass* find_known(PyTypeObject* type) {
  Classes& all = Classes::all();
  const auto found = all.known.find(type);
  if (found != all.known.end()) {
    return found->second.get();
  }
  const auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  const auto text = py::cast<std::string>(object.attr("__module__")) + "." +
                    py::cast<std::string>(object.attr("__qualname__"));
  std::unique_ptr<KnownClass> known;
  if (takes_name(text, type, object)) {
    known = std::make_unique<KnownClass>();
    known->kept = object;
    known->name = py::str(text).release().ptr();
    const bool output = is_model_output(object);
    known->held = find_held(object, output, *known);
    known->is_fixed = output || known->held == Held::kItems || is_frozen(object);
  } else {
    object.inc_ref();  // its address stays its own
  }
  return all.known.emplace(type, std::move(known)).first->second.get();
}

// Throws py::error_already_set.
py::object name_of_member(const py::object& member) {
  const auto type = py::type::of(member);
  PyObject* const of_class = class_name(reinterpret_cast<PyTypeObject*>(type.ptr()));
  const py::object name = member.attr("_name_");
  if (of_class == nullptr || !PyUnicode_CheckExact(name.ptr())) {
    return py::object();
  }
  // Under its name or, where flags are combined, under its value.
  py::object found = type.attr("_member_map_").attr("get")(name);
  if (!found.is(member)) {
    found = type.attr("_value2member_map_").attr("get")(member.attr("_value_"));
  }
  return found.is(member) ? py::reinterpret_borrow<py::str>(of_class) + py::str(".") + name
                          : py::object();
}

}  // namespace

const KnownClass* known_class(PyTypeObject* type) noexcept {
  try {
    return find_known(type);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("eagercache");
  } catch (...) {
    PyErr_Clear();
  }
  return nullptr;
}

void forget_object_classes() {
  Classes& all = Classes::all();
  for (auto& [type, known] : all.known) {
    if (known != nullptr) {
      all.former.push_back(std::move(known));
    }
  }
  all.known.clear();
  all.names.clear();
}

PyObject* class_name(PyTypeObject* type) noexcept {
  const KnownClass* known = known_class(type);
  return known == nullptr ? nullptr : known->name;
}

bool is_open_class(PyTypeObject* type) noexcept {
  // These may be another thing at every call: a class can be given such a method.
  if (type->tp_getattro != PyObject_GenericGetAttr || type->tp_finalize != nullptr ||
      !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
    return false;
  }
  const KnownClass* known = known_class(type);
  return known != nullptr && known->held != Held::kNowhere &&
         (known->is_fixed || type->tp_setattro == PyObject_GenericSetAttr);
}

PyObject* member_name(PyObject* object) noexcept {
  static auto* const meta = reinterpret_cast<PyTypeObject*>(
      py::module_::import("enum").attr("EnumMeta").cast<py::object>().release().ptr());
  // Kept for ever, as their classes keep them.
  static auto* const names = new std::unordered_map<PyObject*, PyObject*>();
  if (Py_TYPE(Py_TYPE(object)) != meta) {
    return nullptr;
  }
  const auto found = names->find(object);
  if (found != names->end()) {
    // Another class may have the name by now.
    return class_name(Py_TYPE(object)) == nullptr ? nullptr : found->second;
  }
  try {
    const auto member = py::reinterpret_borrow<py::object>(object);
    py::object name = name_of_member(member);
    if (name) {
      PyObject* const text = name.release().ptr();
      names->emplace(member.inc_ref().ptr(), text);
      return text;
    }
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("eagercache");
  } catch (...) {
    PyErr_Clear();
  }
  return nullptr;
}

}  // namespace eagercache
