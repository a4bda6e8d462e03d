#include "python_hooks/bindings/module_binding.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/observe/verification.h"
#include "dispatcher/runtime/runtime.h"
#include "python_hooks/bindings/module_kernel_binding.h"
#include "python_hooks/bindings/module_shape_binding.h"
#include "python_hooks/nn_modules/call/call.h"
#include "python_hooks/nn_modules/object_classes.h"
#include "python_hooks/nn_modules/registry.h"
#include "python_hooks/nn_modules/training/training.h"
#include "python_hooks/nn_modules/training/training_node.h"

namespace eagercache {

namespace py = pybind11;

std::vector<Word> words_of(const py::bytes& key) {
  const std::string bytes = key;
  if (bytes.size() % sizeof(Word) != 0) {
    throw py::value_error("the key is not whole words");
  }
  std::vector<Word> words(bytes.size() / sizeof(Word));
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

namespace {

std::shared_ptr<ModuleRecord> require_record(py::handle module) {
  auto record = ModuleRegistry::instance().find(module.ptr());
  if (record == nullptr) {
    throw py::key_error("the module is not known");
  }
  return record;
}

// (submodule, [(kind, name, steps), ...], the variables that its hooks read, at most one, or None
// where it may have no hooks, rows of its attributes or None) for each module of the tree, the root
// first.
using GuardEntry =
    std::tuple<py::object, std::vector<std::tuple<std::string, std::string, py::tuple>>,
               std::optional<std::vector<py::object>>, std::optional<py::list>>;

bool set_guard(const py::object& module, const std::vector<GuardEntry>& entries,
               const std::string& identity, std::uint64_t version, const py::list& values,
               bool forget_forms, bool keeps_former, bool takes_others) {
  auto record = require_record(module);
  record->asked = false;
  auto guard = std::make_unique<ModuleGuard>();
  for (const auto& [submodule, tensors, collectors, attributes] : entries) {
    guard->add_module(submodule);
    if (attributes.has_value()) {
      guard->add_attributes(*attributes);
    }
    if (collectors.has_value()) {
      guard->allow_forward_hooks(collectors->empty() ? std::nullopt
                                                     : std::optional(collectors->front()));
    }
    for (const auto& [kind, name, steps] : tensors) {
      guard->add_tensor(kind, name, steps);
    }
  }
  guard->values().add(values);
  if (takes_others) {
    guard->allow_other_tensors();
  }
  return ModuleRegistry::instance().set_guard(*record, std::move(guard), identity, version,
                                              forget_forms, keeps_former);
}

py::list module_stats() {
  py::list rows;
  for (const auto& record : ModuleRegistry::instance().records()) {
    py::dict aside;
    for (std::size_t i = 0; i < kModuleAsideCount; ++i) {
      if (record->aside[i] != 0) {
        aside[module_aside_name(static_cast<ModuleAside>(i))] = record->aside[i];
      }
    }
    py::dict row;
    row["module"] = py::reinterpret_borrow<py::object>(record->module);
    const bool refused = record->state == ModuleRecord::State::kRefused || record->left[0];
    row["state"] = refused ? "refused" : record->valid ? "watched" : "new";
    row["hits"] = record->hits;
    row["training_hits"] = record->training_hits;
    row["native"] = record->native;
    row["pending"] = record->pending;
    row["aside_reasons"] = aside;
    std::uint64_t replayed = 0;
    std::string replay;
    for (const ModuleKernel* kernel : record->kernels()) {
      replayed += kernel->replays.replayed();
      replay = kernel->replays.said().empty() ? replay : kernel->replays.said();
    }
    row["replayed"] = replayed;
    row["replay"] = replay;
    rows.append(row);
  }
  return rows;
}

void install(const py::object& module, const std::string& identity, const py::bytes& key,
             ModuleKernel* kernel) {
  auto record = ModuleRegistry::instance().find(module.ptr());
  if (record == nullptr) {
    return;
  }
  const std::vector<Word> words = words_of(key);
  if (kernel != nullptr) {
    record->require_tensors_of(*kernel);
  }
  record->install(identity, words, kernel);
}

void bind_calls(py::module_& module) {
  module.def("module_call", &make_module_call, py::arg("original"));
  module.def("module_changed",
             [](py::handle object) { ModuleRegistry::instance().note_changed(object.ptr()); });
  module.def("set_parameter_type", [](py::handle type) { set_parameter_type(type.ptr()); });
  module.def("set_global_hooks", &set_global_hooks, py::arg("dictionaries"));
  module.def(
      "set_module_handlers",
      [](const py::object& select, const py::object& look, const py::object& missed,
         const py::object& unfit, const py::object& is_wrong, const py::object& lost,
         const py::object& name) {
        ModuleRegistry::instance().set_handlers(
            {select, look, missed, unfit, is_wrong, lost, name});
      },
      py::arg("select"), py::arg("look"), py::arg("missed"), py::arg("unfit"),
      py::arg("is_wrong") = py::none(), py::arg("lost") = py::none(), py::arg("name") = py::none());
  module.def(
      "difference_from_native",
      [](py::handle kernel, py::handle native) {
        return difference_from_native(THPVariable_Unpack(kernel.ptr()),
                                      THPVariable_Unpack(native.ptr()));
      },
      py::arg("kernel"), py::arg("native"));
  module.def("set_modules_active",
             [](bool active) { ModuleRegistry::instance().set_active(active); });
  module.def("set_functions_aside",
             [](bool aside) { Runtime::instance().set_functions_aside(aside); });
}

void bind_records(py::module_& module) {
  module.def("module_adopt", [](py::handle object) {
    auto record = ModuleRegistry::instance().adopt(object.ptr());
    if (record->state == ModuleRecord::State::kRefused) {
      record->state = ModuleRecord::State::kNew;
    }
    ModuleRegistry::instance().ask_to_look(*record);
  });
  module.def("module_refuse", [](py::handle object) {
    require_record(object)->state = ModuleRecord::State::kRefused;
  });
  module.def("module_version", [](py::handle object) -> py::object {
    const auto record = ModuleRegistry::instance().find(object.ptr());
    return record == nullptr ? py::none() : py::object(py::int_(record->version));
  });
  module.def("module_forget",
             [](py::handle object) { ModuleRegistry::instance().forget(object.ptr()); });
  module.def("modules_forget_all", [] { ModuleRegistry::instance().forget_all(); });
  module.def("module_set_guard", &set_guard, py::arg("module"), py::arg("entries"),
             py::arg("identity"), py::arg("version"), py::arg("values") = py::list(),
             py::arg("forget_forms") = false, py::arg("keeps_former") = false,
             py::arg("takes_others") = false);
  module.def("module_identity", [](py::handle object) {
    const auto record = ModuleRegistry::instance().find(object.ptr());
    return record == nullptr ? std::string() : record->guard_identity;
  });
  module.def(
      "module_watch_values",
      [](py::handle object, const py::list& values, const std::string& identity,
         const py::list& ways) {
        const auto record = require_record(object);
        record->values->add(values);
        record->ways[identity].add(ways);
      },
      py::arg("module"), py::arg("values"), py::arg("identity"), py::arg("ways"));
  module.def(
      "module_values_changed",
      [](py::handle object, const std::string& identity) {
        const auto record = require_record(object);
        return record->values_changed || !record->ways_hold(identity);
      },
      py::arg("module"), py::arg("identity"));
  module.def("module_values_changes", [](py::handle object) -> py::object {
    const auto record = ModuleRegistry::instance().find(object.ptr());
    if (record == nullptr) {
      return py::none();
    }
    if (!record->values->same()) {
      record->note_values_changed();
    }
    return py::int_(record->values_changes);
  });
  module.def("module_looks_in_vain", [](py::handle object) {
    const auto record = require_record(object);
    return py::make_tuple(record->looks_in_vain, record->looks_without_hits);
  });
  module.def("module_install", &install, py::arg("module"), py::arg("identity"), py::arg("key"),
             py::arg("kernel"));
  module.def("module_stats", &module_stats);
}

// RelaxedCapture as a Python context manager.
struct RelaxedBlock {
  std::optional<RelaxedCapture> relaxed;
};

void bind_cuda(py::module_& module) {
  module.def(
      "cuda_architecture",
      [](int index) {
        return cuda_architecture(
            c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)));
      },
      py::arg("device_index"));
  py::class_<RelaxedBlock>(module, "RelaxedCapture")
      .def(py::init<>())
      .def("__enter__", [](RelaxedBlock& block) { block.relaxed.emplace(); })
      .def("__exit__", [](RelaxedBlock& block, const py::args&) { block.relaxed.reset(); });
}

void bind_replays(py::module_& module) {
  py::class_<GraphLane, std::shared_ptr<GraphLane>>(module, "GraphLane")
      .def(py::init([](int device, std::uintptr_t stream) {
             return std::make_shared<GraphLane>(
                 c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)),
                 reinterpret_cast<void*>(stream));
           }),
           py::arg("device_index"), py::arg("stream"))
      .def("close", &GraphLane::close, py::call_guard<py::gil_scoped_release>());
  py::class_<CaptureRequest>(module, "CaptureRequest")
      .def_property_readonly(
          "device_index",
          [](const CaptureRequest& request) { return static_cast<int>(request.device().index()); })
      .def_property_readonly("stream",
                             [](const CaptureRequest& request) {
                               return reinterpret_cast<std::uintptr_t>(request.stream());
                             })
      .def_property_readonly("num_nodes", &CaptureRequest::num_nodes)
      .def("capture", &CaptureRequest::capture, py::arg("lane"))
      .def("outputs", [](CaptureRequest& request, bool replayed) {
        py::list list;
        for (const at::Tensor& tensor : request.outputs(replayed)) {
          list.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
        }
        return list;
      });
  module.def("set_replay_handler", &set_replay_handler, py::arg("handler"));
  module.def("make_capture_stream",
             [] { return reinterpret_cast<std::uintptr_t>(make_capture_stream()); });
}

void bind_training(py::module_& module) {
  module.def("set_modules_training",
             [](bool training) { ModuleRegistry::instance().set_training(training); });
  module.def("modules_step_aside", &modules_step_aside, py::arg("begins"));
  module.def("set_eager_gradients", &set_eager_gradients, py::arg("handler"));
  module.def("forget_object_classes", &forget_object_classes);
  module.def(
      "module_leave",
      [](py::handle object, bool gradients, bool left) {
        require_record(object)->leave(gradients, left);
      },
      py::arg("module"), py::arg("gradients"), py::arg("left"));
}

}  // namespace

void bind_modules(py::module_& module) {
  bind_module_shapes(module);
  bind_calls(module);
  bind_training(module);
  bind_cuda(module);
  bind_records(module);
  bind_replays(module);
  bind_module_kernels(module);
}

}  // namespace eagercache
