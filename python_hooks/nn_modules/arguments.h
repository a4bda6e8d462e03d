#pragma once

// The arguments of a module's call as words, and what a tensor's kernel depends on. Nothing here
// owns a tensor: forms point into the call's own arguments and are good until it returns. Under the
// GIL.

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "guards/key/call_key.h"

namespace eagercache {

// Why a call of an accelerated module is answered by its own forward.
enum class ModuleAside : std::uint8_t {
  kNone,
  kDispatchState,  // a Python mode, functorch, tracing, or an unusual floating-point mode
  kGlobalState,    // attention back ends switched off, or another GPU is the current one
  kHooks,          // forward or backward hooks on the module, below it, or on all modules
  kChanged,        // an attribute, submodule or parameter changed; being looked at again
  kGradients,      // the call needs gradients, and has no kernel with them
  kArgument,       // an argument that can be no kernel's: see read_arguments
  kTensorKind,     // a tensor subclass, sparse, empty, on another device ...
  kTooManyForms,   // more different calls than are remembered
  kIndexRange,     // an index out of the range that the kernel may read
  kSavedHooks,     // the call needs gradients, and hooks look at what is saved for them
  kArgumentTwice,  // an object, or a list or dict that one holds, is reached twice
  kAnomalyMode,    // autograd is asked to name the operator of the forward at fault
};
inline constexpr std::size_t kModuleAsideCount = 13;
const char* module_aside_name(ModuleAside reason) noexcept;

// The metadata of one tensor that a module's kernel depends on.
struct TensorForm {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  bool aligned = true;  // the data pointer is a multiple of kAlignment
  c10::SmallVector<std::int64_t, 5> sizes;
  c10::SmallVector<std::int64_t, 5> strides;

  static TensorForm of(const at::Tensor& tensor);
  bool matches(const c10::TensorImpl& impl) const noexcept;
};

// True for a dense CPU or CUDA tensor of a common kind that has memory.
bool is_plain(const c10::TensorImpl& impl) noexcept;
// As is_plain, also of one without elements, which needs no memory.
bool is_plain_or_empty(const c10::TensorImpl& impl) noexcept;

// The tensor in `object` when its Python type is exactly torch.Tensor or torch.nn.Parameter, else
// nullptr. Lives as long as the object.
const at::Tensor* exact_tensor(PyObject* object) noexcept;
// torch.nn.Parameter; called once, before the first exact_tensor. Keeps a reference for ever.
void set_parameter_type(PyObject* type) noexcept;

// A kernel with symbolic sizes may take an integer that an object holds (how many tokens a cache
// has seen) as it takes a size: as that of a tensor of so many more rows without elements, since
// Inductor has no other inputs, and takes sizes of 0 and 1 for what they are.
inline constexpr std::int64_t kCountOffset = 2;

// What one walk over a call's arguments gives. Positional arguments first, then keyword arguments
// in the order given; containers depth first: the order in which the Python side walks too.
struct ModuleCallForm {
  c10::SmallVector<Word, 128> words;
  c10::SmallVector<const at::Tensor*, 16> tensors;  // owned by the arguments
  c10::SmallVector<std::int64_t, 32> counts;        // such integers, 0 and above
  c10::SmallVector<at::Tensor, 4> count_tensors;    // for those that the call's kernel takes
  c10::SmallVector<PyObject*, 32> objects;          // instances of classes; likewise
  std::optional<c10::Device> device;                // of the tensors, which all have the same
  bool requires_grad = false;
};

// Reads the arguments (without `self`): tensors, numbers, strings, None, tuples, lists and dicts of
// them, and objects (objects.h) with all that they hold, where nothing is reached twice. Needs the
// GIL; runs no Python code. On anything but kNone the contents of `form` are unspecified.
ModuleAside read_arguments(std::span<PyObject* const> positional, PyObject* keyword_names,
                           PyObject* const* keyword_values, ModuleCallForm& form);

// Where one tensor stands in the words of a form: the index of its header, which its sizes and then
// its strides follow, `rank` words each. Or a count, whose one word has no strides.
struct SizedPlace {
  std::size_t word = 0;
  std::size_t rank = 0;
  bool is_same = false;  // as a tensor before it
  bool is_count = false;

  std::size_t end() const noexcept { return word + 1 + (is_count ? 1 : 2 * rank); }
};

// The tensors and counts among the words that read_arguments wrote, in their order, whatever comes
// after them. Empty when the words are no such ones.
std::vector<SizedPlace> sized_places(std::span<const Word> words);

}  // namespace eagercache
