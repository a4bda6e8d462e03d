#include "python_hooks/nn_modules/writes.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "dispatcher/operators/version_counter.h"

namespace eagercache {
namespace {

// All memory that a tensor's storage has: nothing else of the call may lie in it.
struct Memory {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool written = false;

  static Memory of(const at::Tensor& tensor) {
    const c10::Storage& storage = tensor.storage();
    const auto begin = reinterpret_cast<std::uintptr_t>(storage.data());
    return {begin, begin + storage.nbytes()};
  }
};

}  // namespace

bool may_write(const ModuleKernel& kernel, const ModuleGuard& guard, const ModuleCallForm& form) {
  c10::SmallVector<Memory, 64> memory;
  for (const ModuleKernel::Input& input : kernel.inputs) {
    memory.push_back(Memory::of(input_of(input, guard, form)));
  }
  for (const ModuleKernel::Write& write : kernel.writes) {
    if (input_of(kernel.inputs[write.input], guard, form).is_inference() &&
        !c10::InferenceMode::is_enabled()) {
      return false;  // eager raises
    }
    memory[write.input].written = true;
  }
  std::ranges::sort(memory, {}, &Memory::begin);
  std::uintptr_t end = 0;          // of all that lies before
  std::uintptr_t written_end = 0;  // of what is written before
  for (const Memory& one : memory) {
    if (one.begin < (one.written ? end : written_end)) {
      return false;
    }
    end = std::max(end, one.end);
    written_end = one.written ? std::max(written_end, one.end) : written_end;
  }
  return true;
}

c10::SmallVector<at::Tensor, 4> written_tensors(const ModuleKernel& kernel,
                                                const ModuleGuard& guard,
                                                const ModuleCallForm& form) {
  c10::SmallVector<at::Tensor, 4> written;
  for (const ModuleKernel::Write& write : kernel.writes) {
    written.push_back(input_of(kernel.inputs[write.input], guard, form));
  }
  return written;
}

void move_versions(const ModuleKernel& kernel, c10::ArrayRef<at::Tensor> written) {
  for (std::size_t i = 0; i < written.size(); ++i) {
    for (std::uint32_t times = 0; times < kernel.writes[i].times; ++times) {
      move_version(written[i]);
    }
  }
}

pybind11::tuple changed_objects(const ModuleKernel& kernel, const ModuleGuard& guard,
                                const ModuleCallForm& form) {
  const std::size_t objects = kernel.takes_objects ? form.objects.size() : 0;
  pybind11::tuple changed(objects + kernel.stores.size() + kernel.given.size());
  std::size_t at = 0;
  for (std::size_t i = 0; i < objects; ++i) {
    changed[at++] = pybind11::reinterpret_borrow<pybind11::object>(form.objects[i]);
  }
  for (const std::size_t module : kernel.stores) {
    changed[at++] = pybind11::reinterpret_borrow<pybind11::object>(guard.modules().at(module));
  }
  for (const std::size_t argument : kernel.given) {
    if (argument >= form.tensors.size()) {
      throw std::out_of_range("the kernel asks for an argument that the call does not have");
    }
    changed[at++] =
        pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(*form.tensors[argument]));
  }
  return changed;
}

void raise_undefined(const ModuleKernel& kernel) {
  PyErr_Format(
      PyExc_RuntimeError,
      "eagercache: a kernel for a whole module (entry %s) failed after it may have written "
      "its arguments or buffers; their contents are undefined. The forward answers such calls from "
      "now on.",
      kernel.digest.c_str());
}

}  // namespace eagercache
