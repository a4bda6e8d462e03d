#include "python_hooks/nn_modules/objects.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>
#include <unordered_map>
#include <utility>

#include "dispatcher/hook/inside_guard.h"
#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/object_classes.h"

namespace eagercache {
namespace {

namespace py = pybind11;

PyObject*& slot_of(PyObject* object, Py_ssize_t offset) noexcept {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

// The `__dict__` of an object; nullptr, without an exception, where there is no memory for it.
// Lives as long as the object.
PyObject* attributes_of(PyObject* object) noexcept {
  PyObject* const held = PyObject_GenericGetDict(object, nullptr);
  if (held == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  Py_DECREF(held);  // the object has it
  return held;
}

// Whether an object of an open class is no dict, or holds those of its attributes that are not None
// and nothing else, in their order.
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

// Copies the containers and objects of one call. `of_tensor` says what is in the place of a tensor;
// all other values stay themselves.
class Copier {
 public:
  using OfTensor = std::function<py::object(const py::handle& value, const at::Tensor& tensor)>;

  explicit Copier(OfTensor of_tensor) : of_tensor_(std::move(of_tensor)) {}

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
    if (const at::Tensor* tensor = exact_tensor(object); tensor != nullptr) {
      return of_tensor_(value, *tensor);
    }
    return is_open_class(Py_TYPE(object)) ? of_object(value)
                                          : py::reinterpret_borrow<py::object>(value);
  }

 private:
  py::object of_object(const py::handle& value) {
    PyTypeObject* const type = Py_TYPE(value.ptr());
    if (PyTuple_Check(value.ptr())) {
      py::tuple items(PyTuple_GET_SIZE(value.ptr()));
      for (std::size_t i = 0; i < items.size(); ++i) {
        items[i] = of(PyTuple_GET_ITEM(value.ptr(), static_cast<Py_ssize_t>(i)));
      }
      return make(PyTuple_Type.tp_new, type, py::make_tuple(items));
    }
    const bool is_dict = PyODict_Check(value.ptr());
    const py::object made =
        make(is_dict ? PyODict_Type.tp_new : PyBaseObject_Type.tp_new, type, py::tuple());
    const KnownClass* known = known_class(type);
    if (known != nullptr && known->held == Held::kSlots) {
      for (const Py_ssize_t offset : known->offsets) {
        if (PyObject* const held = slot_of(value.ptr(), offset); held != nullptr) {
          slot_of(made.ptr(), offset) = of(held).release().ptr();
        }
      }
      return made;
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

  static py::object make(newfunc make, PyTypeObject* type, const py::tuple& given) {
    auto made = py::reinterpret_steal<py::object>(make(type, given.ptr(), nullptr));
    if (!made) {
      throw py::error_already_set();
    }
    return made;
  }

  OfTensor of_tensor_;
};

}  // namespace

Fields::Fields(PyObject* object) noexcept : object_(object) {
  const KnownClass* known = known_class(Py_TYPE(object));
  if (known == nullptr) {
    return;
  }
  class_name_ = known->name;
  if (known->held == Held::kAttributes) {
    attributes_ = attributes_of(object);
    if (attributes_ == nullptr || !holds_its_fields(object, attributes_)) {
      return;
    }
    size_ = PyDict_GET_SIZE(attributes_);
  } else {
    names_ = known->fields;
    offsets_ = known->offsets;
    size_ = static_cast<Py_ssize_t>(names_.size());
    if (known->held == Held::kItems && PyTuple_GET_SIZE(object) != size_) {
      return;
    }
    for (const Py_ssize_t offset : offsets_) {
      size_ -= slot_of(object, offset) == nullptr ? 1 : 0;
    }
  }
  readable_ = true;
}

bool Fields::next(PyObject** name, PyObject** value) noexcept {
  if (attributes_ != nullptr) {
    return PyDict_Next(attributes_, &position_, name, value) != 0;
  }
  while (position_ < static_cast<Py_ssize_t>(names_.size())) {
    const auto at = static_cast<std::size_t>(position_++);
    *name = names_[at].ptr();
    *value = offsets_.empty() ? PyTuple_GET_ITEM(object_, static_cast<Py_ssize_t>(at))
                              : slot_of(object_, offsets_[at]);
    if (*value != nullptr) {
      return true;
    }
  }
  return false;
}

py::object copy_of_objects(const py::handle& value) {
  std::unordered_map<PyObject*, py::object> counters;  // one tensor stays one
  return Copier([&counters](const py::handle& given, const at::Tensor& tensor) {
           if (!may_count(tensor)) {
             return py::reinterpret_borrow<py::object>(given);
           }
           py::object& copied = counters[given.ptr()];
           if (!copied) {
             copied = copy_of_counter(given, tensor);
           }
           return copied;
         })
      .of(value);
}

py::object without_tensors(const py::handle& value, std::span<const std::size_t> dropped,
                           std::size_t* next) {
  return Copier([&](const py::handle& given, const at::Tensor& /*tensor*/) {
           const bool drops = std::ranges::binary_search(dropped, (*next)++);
           return py::reinterpret_borrow<py::object>(drops ? Py_Ellipsis : given.ptr());
         })
      .of(value);
}

}  // namespace eagercache
