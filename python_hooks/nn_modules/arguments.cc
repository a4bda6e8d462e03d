#include "python_hooks/nn_modules/arguments.h"

#include <c10/core/TensorImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "python_hooks/nn_modules/argument_words.h"
#include "python_hooks/nn_modules/objects.h"

namespace eagercache {
namespace {

namespace py = pybind11;

constexpr c10::DispatchKeySet kPlainKeys = c10::DispatchKeySet(
    {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU,
     c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
     c10::DispatchKey::ADInplaceOrView});

constexpr std::int64_t kMaxNumel = std::numeric_limits<std::int32_t>::max();
constexpr int kMaxDepth = 8;
constexpr std::size_t kMaxWords = 16384;
constexpr long long kMaxCount = std::numeric_limits<std::int32_t>::max();

PyObject* parameter_type = nullptr;

bool is_parameter(PyObject* object) noexcept {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == parameter_type;
}

enum class Attributes : std::uint8_t { kNone, kMark, kOther };

// Whether the program gave the tensor attributes of its own. A mark is torch's: its address stays
// the same (torch._dynamo.mark_static_address), as that of what transformers' static caches hold.
Attributes attributes_of_tensor(PyObject* object) noexcept {
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
    return Attributes::kOther;
  }
  Attributes found = PyDict_GET_SIZE(dict) == 0 ? Attributes::kNone : Attributes::kOther;
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  if (PyDict_GET_SIZE(dict) == 1 && PyDict_Next(dict, &position, &name, nullptr) != 0 &&
      PyUnicode_CheckExact(name) &&
      PyUnicode_CompareWithASCIIString(name, "_dynamo_static_input_type") == 0) {
    found = Attributes::kMark;
  }
  Py_DECREF(dict);
  return found;
}

bool is_aligned(const c10::TensorImpl& impl) noexcept {
  return reinterpret_cast<std::uintptr_t>(impl.data()) % kAlignment == 0;
}

// Appends the words of one argument after another to a form. Under the GIL.
class Reader {
 public:
  explicit Reader(ModuleCallForm& form) noexcept : form_(form) {}

  ModuleAside value(PyObject* object, int depth) {
    if (form_.words.size() > kMaxWords || depth > kMaxDepth) {
      return ModuleAside::kArgument;
    }
    if (object == Py_None) {
      put(header(Tag::kNone));
    } else if (const at::Tensor* tensor = exact_tensor(object)) {
      // A forward may ask for either.
      const Attributes held = attributes_of_tensor(object);
      return held == Attributes::kOther
                 ? ModuleAside::kTensorKind
                 : this->tensor(*tensor, is_parameter(object), held == Attributes::kMark);
    } else if (object == Py_True || object == Py_False) {
      put(header(object == Py_True ? Tag::kTrue : Tag::kFalse));
    } else if (PyLong_CheckExact(object)) {
      return integer(object);
    } else if (PyFloat_CheckExact(object)) {
      put(header(Tag::kFloat));
      put(std::bit_cast<Word>(PyFloat_AS_DOUBLE(object)));
    } else if (PyUnicode_CheckExact(object)) {
      return text(Tag::kString, object);
    } else if (PyTuple_CheckExact(object)) {
      return sequence(Tag::kTuple, object, PySequence_Fast_ITEMS(object), PyTuple_GET_SIZE(object),
                      depth);
    } else if (PyList_CheckExact(object)) {
      return sequence(Tag::kList, object, PySequence_Fast_ITEMS(object), PyList_GET_SIZE(object),
                      depth);
    } else if (PyDict_CheckExact(object)) {
      return dict(object, depth);
    } else if (THPVariable_Check(object)) {
      return ModuleAside::kTensorKind;
    } else if (is_open_class(Py_TYPE(object))) {
      return instance(object, depth);
    } else {
      return inside_ ? of_object(object) : ModuleAside::kArgument;
    }
    return ModuleAside::kNone;
  }

  ModuleAside text(Tag tag, PyObject* object) {
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(object, &size);
    if (bytes == nullptr) {
      PyErr_Clear();
      return ModuleAside::kArgument;
    }
    put(header(tag, static_cast<Word>(size)));
    for (Py_ssize_t at = 0; at < size; at += static_cast<Py_ssize_t>(sizeof(Word))) {
      Word packed = 0;
      std::memcpy(&packed, bytes + at, std::min(static_cast<std::size_t>(size - at), sizeof(Word)));
      put(packed);
    }
    return form_.words.size() > kMaxWords ? ModuleAside::kArgument : ModuleAside::kNone;
  }

 private:
  void put(Word word) { form_.words.push_back(word); }

  ModuleAside integer(PyObject* object, bool is_key = false) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) {
      return ModuleAside::kArgument;
    }
    const bool counts = inside_ && !is_key && number >= 0 && number <= kMaxCount;
    if (counts) {
      form_.counts.push_back(number);
    }
    put(header(counts ? Tag::kCount : Tag::kInt));
    put(static_cast<Word>(number));
    return ModuleAside::kNone;
  }

  // Whether what an object holds is met for the first time: a kernel's copy of it is a tree.
  bool is_new(PyObject* object) {
    if (!inside_) {
      return true;
    }
    const bool met = std::ranges::find(met_, object) != met_.end();
    met_.push_back(object);
    return !met;
  }

  ModuleAside instance(PyObject* object, int depth) {
    Fields fields(object);
    if (!fields.readable()) {
      return ModuleAside::kArgument;
    }
    const bool outer = std::exchange(inside_, true);
    if (!is_new(object)) {
      return ModuleAside::kArgumentTwice;
    }
    form_.objects.push_back(object);
    put(header(Tag::kObject, static_cast<Word>(fields.size())));
    ModuleAside reason = text(Tag::kString, fields.class_name());
    PyObject* key = nullptr;
    PyObject* held = nullptr;
    while (reason == ModuleAside::kNone && fields.next(&key, &held)) {
      reason = item(key, held, depth);
    }
    inside_ = outer;
    return reason;
  }

  // What objects hold, and no call is given by itself.
  ModuleAside of_object(PyObject* object) {
    if (THPDtype_Check(object)) {
      const auto type = reinterpret_cast<THPDtype*>(object)->scalar_type;
      put(header(Tag::kScalarType, static_cast<Word>(type)));
    } else if (THPDevice_Check(object)) {
      const c10::Device device = reinterpret_cast<THPDevice*>(object)->device;
      put(header(Tag::kDevice, (static_cast<Word>(device.type()) << 16) |
                                   (static_cast<Word>(device.index()) & 0xFFFF)));
    } else if (PyType_Check(object)) {
      PyObject* const name = class_name(reinterpret_cast<PyTypeObject*>(object));
      return name == nullptr ? ModuleAside::kArgument : text(Tag::kClass, name);
    } else if (PyObject* const member = member_name(object); member != nullptr) {
      return text(Tag::kMember, member);
    } else {
      return ModuleAside::kArgument;
    }
    return ModuleAside::kNone;
  }

  ModuleAside sequence(Tag tag, PyObject* object, PyObject* const* items, Py_ssize_t count,
                       int depth) {
    if (tag == Tag::kList && !is_new(object)) {
      return ModuleAside::kArgumentTwice;
    }
    put(header(tag, static_cast<Word>(count)));
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (const ModuleAside reason = value(items[i], depth + 1); reason != ModuleAside::kNone) {
        return reason;
      }
    }
    return ModuleAside::kNone;
  }

  ModuleAside dict(PyObject* object, int depth) {
    if (!is_new(object)) {
      return ModuleAside::kArgumentTwice;
    }
    put(header(Tag::kDict, static_cast<Word>(PyDict_GET_SIZE(object))));
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* held = nullptr;
    while (PyDict_Next(object, &position, &key, &held) != 0) {
      if (const ModuleAside reason = item(key, held, depth); reason != ModuleAside::kNone) {
        return reason;
      }
    }
    return ModuleAside::kNone;
  }

  // A key or the name of an attribute, and what it stands for.
  ModuleAside item(PyObject* key, PyObject* held, int depth) {
    ModuleAside reason = ModuleAside::kArgument;
    if (PyUnicode_CheckExact(key)) {
      reason = text(Tag::kString, key);
    } else if (inside_ && PyLong_CheckExact(key)) {
      reason = integer(key, /*is_key=*/true);
    }
    return reason == ModuleAside::kNone ? value(held, depth + 1) : reason;
  }

  ModuleAside tensor(const at::Tensor& tensor, bool is_parameter, bool is_marked) {
    if (!tensor.defined()) {
      return ModuleAside::kTensorKind;
    }
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (!is_plain(impl)) {
      return ModuleAside::kTensorKind;
    }
    if (impl.requires_grad()) {
      form_.requires_grad = true;
    } else if (impl.autograd_meta() != nullptr && tensor._fw_grad(0).defined()) {
      return ModuleAside::kDispatchState;
    }
    if (form_.device.value_or(impl.device()) != impl.device()) {
      return ModuleAside::kTensorKind;
    }
    form_.device = impl.device();
    const auto dtype = static_cast<Word>(c10::typeMetaToScalarType(impl.dtype()));
    put(header(Tag::kTensor, dtype | (static_cast<Word>(impl.dim()) << 24) |
                                 (Word{is_aligned(impl)} << 40) | (Word{is_parameter} << 41) |
                                 (Word{is_marked} << 42)));
    for (const std::int64_t size : impl.sizes()) {
      put(static_cast<Word>(size));
    }
    for (const std::int64_t stride : impl.strides()) {
      put(static_cast<Word>(stride));
    }
    put_same(impl);
    form_.tensors.push_back(&tensor);
    return ModuleAside::kNone;
  }

  // A forward may ask whether two arguments are one object, and a trace reads one of them alone.
  void put_same(const c10::TensorImpl& impl) {
    for (std::size_t i = 0; i < form_.tensors.size(); ++i) {
      if (form_.tensors[i]->unsafeGetTensorImpl() == &impl) {
        put(header(Tag::kSame, static_cast<Word>(i)));
        return;
      }
    }
  }

  ModuleCallForm& form_;
  bool inside_ = false;                  // of an object
  c10::SmallVector<PyObject*, 32> met_;  // objects, and what they hold that can be changed
};

}  // namespace

const char* module_aside_name(ModuleAside reason) noexcept {
  constexpr const char* kNames[] = {"none",
                                    "dispatch_state",
                                    "global_state",
                                    "hooks",
                                    "changed",
                                    "gradients",
                                    "argument",
                                    "tensor_kind",
                                    "too_many_forms",
                                    "index_range",
                                    "saved_tensors_hooks",
                                    "argument_twice",
                                    "anomaly_mode"};
  static_assert(std::size(kNames) == kModuleAsideCount);
  return kNames[static_cast<std::size_t>(reason)];
}

bool is_plain(const c10::TensorImpl& impl) noexcept {
  return impl.numel() > 0 && is_plain_or_empty(impl);
}

bool is_plain_or_empty(const c10::TensorImpl& impl) noexcept {
  return (impl.key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0 && impl.has_storage() &&
         impl.numel() <= kMaxNumel && impl.dim() < 64 &&
         (impl.numel() == 0 || impl.unsafe_storage().unsafeGetStorageImpl()->data() != nullptr);
}

TensorForm TensorForm::of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  TensorForm form;
  form.dtype = c10::typeMetaToScalarType(impl.dtype());
  form.device = impl.device();
  form.aligned = is_aligned(impl);
  form.sizes.append(impl.sizes().begin(), impl.sizes().end());
  form.strides.append(impl.strides().begin(), impl.strides().end());
  return form;
}

bool TensorForm::matches(const c10::TensorImpl& impl) const noexcept {
  return is_plain_or_empty(impl) && impl.dtype() == dtype && impl.device() == device &&
         impl.sizes() == c10::IntArrayRef(sizes) && impl.strides() == c10::IntArrayRef(strides) &&
         is_aligned(impl) == aligned;
}

void set_parameter_type(PyObject* type) noexcept {
  Py_INCREF(type);
  parameter_type = type;
}

const at::Tensor* exact_tensor(PyObject* object) noexcept {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != parameter_type) {
    return nullptr;
  }
  return &THPVariable_Unpack(object);
}

ModuleAside read_arguments(std::span<PyObject* const> positional, PyObject* keyword_names,
                           PyObject* const* keyword_values, ModuleCallForm& form) {
  Reader reader(form);
  for (PyObject* object : positional) {
    if (const ModuleAside reason = reader.value(object, 0); reason != ModuleAside::kNone) {
      return reason;
    }
  }
  const Py_ssize_t count = keyword_names == nullptr ? 0 : PyTuple_GET_SIZE(keyword_names);
  for (Py_ssize_t i = 0; i < count; ++i) {
    ModuleAside reason = reader.text(Tag::kKeyword, PyTuple_GET_ITEM(keyword_names, i));
    if (reason == ModuleAside::kNone) {
      reason = reader.value(keyword_values[i], 0);
    }
    if (reason != ModuleAside::kNone) {
      return reason;
    }
  }
  form.words.push_back(header(Tag::kEnd));
  return ModuleAside::kNone;
}

}  // namespace eagercache
