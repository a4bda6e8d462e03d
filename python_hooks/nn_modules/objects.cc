#include "python_hooks/nn_modules/objects.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>

#include "dispatcher/hook/inside_guard.h"
#include "python_hooks/nn_modules/arguments.h"

namespace eagercache {
namespace {

namespace py = pybind11;

struct KnownClass {
  py::object kept;  // the class, so that no other one gets its address
  PyObject* name = nullptr;
  bool is_python = false;  // no part of an instance is in slots or belongs to C
  bool is_fixed = false;   // a frozen dataclass or an output of transformers
};

// abc.ABC stands for all classes that Python code defines: how they end, and the one metaclass
// beside `type` that does nothing to instances. Never freed.
PyTypeObject* plain_class() {
  static auto* const type = reinterpret_cast<PyTypeObject*>(
      py::module_::import("abc").attr("ABC").cast<py::object>().release().ptr());
  return type;
}

bool has_slots(PyTypeObject* type) noexcept {
  PyObject* slots = reinterpret_cast<PyHeapTypeObject*>(type)->ht_slots;
  return slots != nullptr && PyTuple_GET_SIZE(slots) > 0;
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

// With `output`, OrderedDict's part of an instance is known besides.
bool is_python_class(PyTypeObject* type, bool output) {
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
    if (base == &PyBaseObject_Type || (output && (base == &PyODict_Type || base == &PyDict_Type))) {
      continue;
    }
    // A type that C code made ends otherwise.
    if (!PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE) || base->tp_dealloc != plain->tp_dealloc ||
        has_slots(base)) {
      return false;
    }
  }
  return true;
}

// None where another class has the name.
const KnownClass* known_class(PyTypeObject* type) {
  static auto* const classes = new std::unordered_map<PyTypeObject*, std::unique_ptr<KnownClass>>();
  static auto* const names = new std::unordered_map<std::string, PyTypeObject*>();
  const auto found = classes->find(type);
  if (found != classes->end()) {
    return found->second.get();
  }
  const auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  const auto text = py::cast<std::string>(object.attr("__module__")) + "." +
                    py::cast<std::string>(object.attr("__qualname__"));
  std::unique_ptr<KnownClass> known;
  if (names->emplace(text, type).second) {
    known = std::make_unique<KnownClass>();
    known->kept = object;
    known->name = py::str(text).release().ptr();
    const bool output = is_model_output(object);
    known->is_python = is_python_class(type, output);
    known->is_fixed = output || is_frozen(object);
  } else {
    object.inc_ref();  // its address stays its own
  }
  return classes->emplace(type, std::move(known)).first->second.get();
}

const KnownClass* known_or_none(PyTypeObject* type) noexcept {
  try {
    return known_class(type);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("eagercache");
  } catch (...) {
    PyErr_Clear();
  }
  return nullptr;
}

// Whether a forward may count in it, as in the length of a cache: what is known of a call is what
// it held before.
bool may_count(const at::Tensor& tensor) {
  constexpr std::int64_t kMostElements = 64;
  return tensor.defined() && at::isIntegralType(tensor.scalar_type(), false) &&
         tensor.layout() == c10::kStrided && tensor.numel() <= kMostElements &&
         tensor.is_contiguous();
}

// With the attributes of the first one, which say what may be asked of it.
py::object copy_of_counter(const py::handle& value, const at::Tensor& tensor) {
  const InsideGuard inside;
  const at::NoGradGuard no_grad;
  auto made = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.detach().clone()));
  if (!made) {
    throw py::error_already_set();
  }
  made.attr("__dict__").attr("update")(value.attr("__dict__"));
  return made;
}

class Copier {
 public:
  py::object of(const py::handle& value) {
    PyObject* const object = value.ptr();
    if (PyTuple_CheckExact(object)) {
      const auto values = py::reinterpret_borrow<py::tuple>(value);
      py::tuple made(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        made[i] = of(values[i]);
      }
      return made;
    }
    if (PyList_CheckExact(object)) {
      py::list made;
      for (const py::handle item : py::reinterpret_borrow<py::list>(value)) {
        made.append(of(item));
      }
      return made;
    }
    if (PyDict_CheckExact(object)) {
      py::dict made;
      for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
        made[key] = of(item);
      }
      return made;
    }
    if (const at::Tensor* tensor = exact_tensor(object); tensor != nullptr && may_count(*tensor)) {
      py::object& copied = counters_[object];  // one tensor stays one
      if (!copied) {
        copied = copy_of_counter(value, *tensor);
      }
      return copied;
    }
    return is_open_class(Py_TYPE(object)) ? of_object(value)
                                          : py::reinterpret_borrow<py::object>(value);
  }

 private:
  py::object of_object(const py::handle& value) {
    PyTypeObject* const type = Py_TYPE(value.ptr());
    const py::tuple none;
    const bool is_dict = PyODict_Check(value.ptr());
    const newfunc make = is_dict ? PyODict_Type.tp_new : PyBaseObject_Type.tp_new;
    auto made = py::reinterpret_steal<py::object>(make(type, none.ptr(), nullptr));
    if (!made) {
      throw py::error_already_set();
    }
    PyObject* const from = attributes_of(value.ptr());
    PyObject* const to = attributes_of(made.ptr());
    if (from == nullptr || to == nullptr) {
      throw std::bad_alloc();
    }
    for (const auto& [name, held] : py::reinterpret_borrow<py::dict>(from)) {
      const py::object copied = of(held);
      if (PyDict_SetItem(to, name.ptr(), copied.ptr()) != 0 ||
          (is_dict && !copied.is_none() &&
           PyODict_SetItem(made.ptr(), name.ptr(), copied.ptr()) != 0)) {
        throw py::error_already_set();
      }
    }
    return made;
  }

  std::unordered_map<PyObject*, py::object> counters_;
};

}  // namespace

PyObject* class_name(PyTypeObject* type) noexcept {
  const KnownClass* known = known_or_none(type);
  return known == nullptr ? nullptr : known->name;
}

bool is_open_class(PyTypeObject* type) noexcept {
  // These may be another thing at every call: a class can be given such a method.
  if (type->tp_getattro != PyObject_GenericGetAttr || type->tp_finalize != nullptr ||
      !PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
    return false;
  }
  const KnownClass* known = known_or_none(type);
  return known != nullptr && known->is_python &&
         (known->is_fixed || type->tp_setattro == PyObject_GenericSetAttr);
}

bool holds_its_fields(PyObject* object, PyObject* attributes) noexcept {
  if (!PyODict_Check(object)) {
    return true;
  }
  // What classes say of iteration may be another thing; the order is OrderedDict's.
  const auto keys = py::reinterpret_steal<py::object>(PyODict_Type.tp_iter(object));
  if (!keys) {
    PyErr_Clear();
    return false;
  }
  const auto next = [&keys] {
    return py::reinterpret_steal<py::object>(Py_TYPE(keys.ptr())->tp_iternext(keys.ptr()));
  };
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(attributes, &position, &name, &value) != 0) {
    if (value == Py_None) {
      continue;
    }
    const py::object key = next();
    if (!key || !PyUnicode_CheckExact(key.ptr()) || PyUnicode_Compare(key.ptr(), name) != 0 ||
        PyDict_GetItemWithError(object, name) != value) {
      PyErr_Clear();
      return false;
    }
  }
  const bool ends = !next();
  PyErr_Clear();
  return ends;
}

PyObject* attributes_of(PyObject* object) noexcept {
  PyObject* const held = PyObject_GenericGetDict(object, nullptr);
  if (held == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  Py_DECREF(held);  // the object has it
  return held;
}

py::object copy_of_objects(const py::handle& value) { return Copier().of(value); }

}  // namespace eagercache
