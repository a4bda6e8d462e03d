#include "python_hooks/bindings/module_shape_binding.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python_hooks/bindings/module_binding.h"
#include "python_hooks/nn_modules/call/call.h"
#include "python_hooks/nn_modules/registry.h"

namespace eagercache {
namespace {

namespace py = pybind11;

using Rows = std::vector<std::vector<std::int64_t>>;

// (index of the header's word, sizes, dimensions from the innermost one, kind) of each tensor of a
// form and of each count, whose size is its value. The kind is "dense", "strided", "same" (as a
// tensor before it, so that its sizes are no others) or "count"; only dense ones have an order.
py::list form_tensors(const py::bytes& key) {
  const std::vector<Word> words = words_of(key);
  const std::span<const Word> all(words);
  py::list rows;
  for (const SizedPlace& place : sized_places(all)) {
    const auto sizes = all.subspan(place.word + 1, place.rank);
    std::vector<std::uint32_t> order;
    const char* kind = place.is_count ? "count" : "same";
    if (!place.is_count && !place.is_same) {
      order = dense_order(sizes, all.subspan(place.word + 1 + place.rank, place.rank));
      kind = order.size() == place.rank ? "dense" : "strided";
    }
    rows.append(py::make_tuple(place.word, std::vector<std::int64_t>(sizes.begin(), sizes.end()),
                               order, kind));
  }
  return rows;
}

void install_class(const py::object& module, const std::string& identity, const py::bytes& key,
                   const Rows& sizes, ModuleKernel* kernel, ModuleShapeClass::Choice choice) {
  const auto record = ModuleRegistry::instance().find(module.ptr());
  if (record == nullptr) {
    return;
  }
  record->require_tensors_of(*kernel);
  const std::vector<Word> words = words_of(key);
  record->install_class(
      identity, std::make_unique<ModuleShapeClass>(words, sizes, kernel, std::move(choice)));
}

// "kernel" or "native" where a class of the module admits the call, else "".
std::string answers(const py::object& module, const py::bytes& key) {
  const auto record = ModuleRegistry::instance().find(module.ptr());
  ModuleShapeClass::Layout layout;
  bool chosen = false;
  if (record == nullptr || record->find_class(words_of(key), layout, &chosen) == nullptr) {
    return "";
  }
  return chosen ? "kernel" : "native";
}

void open_sizes(ModuleKernel* kernel) {
  kernel->shape =
      reinterpret_cast<ModuleShapeFunction>(kernel->model->symbol("eagercache_module_shape"));
  if (kernel->shape == nullptr) {
    throw std::runtime_error("the kernel says nothing of its sizes");
  }
}

}  // namespace

void bind_module_shapes(py::module_& module) {
  module.def("module_form_tensors", &form_tensors, py::arg("key"));
  module.def("module_open_sizes", &open_sizes, py::arg("kernel"));
  module.def("module_install_class", &install_class, py::arg("module"), py::arg("identity"),
             py::arg("key"), py::arg("sizes"), py::arg("kernel"), py::arg("choice"));
  module.def("module_class_answers", &answers, py::arg("module"), py::arg("key"));
}

}  // namespace eagercache
