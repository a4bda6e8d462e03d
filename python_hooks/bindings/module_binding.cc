#include "python_hooks/bindings/module_binding.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/observe/verification.h"
#include "dispatcher/plans/contract.h"
#include "kernel_cache/loading/shared_library.h"
#include "kernel_cache/store/disk_store.h"
#include "python_hooks/bindings/module_shape_binding.h"
#include "python_hooks/bindings/without_gil.h"
#include "python_hooks/nn_modules/call.h"
#include "python_hooks/nn_modules/training.h"

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

// More inputs than any model has parameters.
constexpr std::size_t kMaxInputs = 1 << 16;
constexpr std::size_t kMaxOutputs = 1 << 10;

std::shared_ptr<ModuleRecord> require_record(py::handle module) {
  auto record = ModuleRegistry::instance().find(module.ptr());
  if (record == nullptr) {
    throw py::key_error("the module is not known");
  }
  return record;
}

// (submodule, [(kind, name), ...]) for each module of the tree, the root first.
using GuardEntry = std::pair<py::object, std::vector<std::pair<std::string, std::string>>>;

bool set_guard(const py::object& module, const std::vector<GuardEntry>& entries,
               const std::string& identity, std::uint64_t version, const py::list& values,
               bool forget_forms) {
  auto record = require_record(module);
  record->asked = false;
  auto guard = std::make_unique<ModuleGuard>();
  for (const auto& [submodule, tensors] : entries) {
    guard->add_module(submodule);
    for (const auto& [kind, name] : tensors) {
      guard->add_tensor(kind, name);
    }
  }
  guard->values().add(values);
  return ModuleRegistry::instance().set_guard(*record, std::move(guard), identity, version,
                                              forget_forms);
}

using Inputs = std::vector<std::pair<bool, std::size_t>>;
using Ranges = std::vector<std::tuple<std::size_t, std::int64_t, std::int64_t, std::int64_t>>;

// Loads the library at `path`. Libraries are shared: one container each. `made` tells whether this
// call made it.
ModelContainer* open_container(const std::filesystem::path& path, c10::Device device, bool* made) {
  static auto* const mutex = new std::mutex();
  static auto* const known = new std::map<std::pair<std::string, std::string>, ModelContainer*>();
  const std::pair<std::string, std::string> name(path.native(), device.str());
  const std::scoped_lock lock(*mutex);
  *made = false;
  if (const auto found = known->find(name); found != known->end()) {
    return found->second;
  }
  const Result<SharedLibrary> library = SharedLibrary::open(path);
  if (!library) {
    throw std::runtime_error(library.status().to_string());
  }
  Result<std::unique_ptr<ModelContainer>> model =
      ModelContainer::open(library.value(), device, {kMaxInputs, kMaxOutputs, true});
  if (!model) {
    throw std::runtime_error(model.status().to_string());
  }
  *made = true;
  return known->emplace(name, std::move(model).value().release()).first->second;
}

void require(const Status& status) {
  if (!status) {
    throw std::runtime_error(status.to_string());
  }
}

// The container of an entry, which must say that it was made for `contract`. Should it kill the
// process, while it is loaded or first run, later processes know (DiskStore::check_attempts).
ModelContainer* open_entry(const std::shared_ptr<DiskStore>& store, const std::string& digest,
                           c10::Device device, std::size_t object, const std::string& contract) {
  const std::optional<Digest> key = Digest::from_hex(digest);
  const std::optional<Digest> wanted = Digest::from_hex(contract);
  if (!key || !wanted) {
    throw std::invalid_argument("'" + (key ? contract : digest) + "' is not 64 hexadecimal digits");
  }
  const Result<Manifest> manifest = store->find(*key);
  require(manifest.status());
  require(store->check_attempts(*key));
  const Result<std::filesystem::path> path =
      store->verified_shared_object(manifest.value(), object);
  require(path.status());
  store->note_attempt(*key, true);
  bool made = false;
  ModelContainer* model = nullptr;
  try {
    model = open_container(path.value(), device, &made);
  } catch (...) {
    store->note_attempt(*key, false);
    throw;
  }
  store->note_attempt(*key, false);
  if (const Status status = check_contract(made_for(model->symbol(kMadeForSymbol)), *wanted);
      !status) {
    (void)store->quarantine(*key, status.message()).is_ok();
    throw std::runtime_error(status.to_string());
  }
  if (made) {
    model->watch_first_run([store, key = *key](bool begins) { store->note_attempt(key, begins); });
  }
  return model;
}

// A kernel's containers are those of an entry in a store, or of libraries by their paths.
using Entry = std::pair<std::shared_ptr<DiskStore>, std::string>;
using Source = std::variant<Entry, std::vector<std::string>>;

ModelContainer* open_source(const Source& source, c10::Device device, std::size_t index,
                            const std::vector<std::string>& contracts) {
  const WithoutGil no_gil;
  if (const auto* entry = std::get_if<Entry>(&source)) {
    return open_entry(entry->first, entry->second, device, index, contracts.at(index));
  }
  bool made = false;
  return open_container(std::get<std::vector<std::string>>(source).at(index), device, &made);
}

// (tensor among the arguments, how often) of those that a kernel writes into.
using Writes = std::vector<std::pair<std::size_t, std::uint32_t>>;

void read_writes(const Writes& writes, ModuleKernel& kernel) {
  for (const auto& [argument, times] : writes) {
    const auto found = std::ranges::find_if(kernel.inputs, [&](const ModuleKernel::Input& input) {
      return !input.from_module && input.index == argument;
    });
    if (found == kernel.inputs.end() || !kernel.takes_objects || kernel.training != nullptr) {
      throw std::runtime_error("the kernel writes into a tensor that is no input of its own");
    }
    kernel.writes.push_back({static_cast<std::size_t>(found - kernel.inputs.begin()), times});
  }
}

// The kernel is never destroyed: records and threads inside it hold plain pointers. With a `plan`,
// for calls that need gradients, there is a second container.
ModuleKernel* load_module(const Source& source, const std::string& device, const Inputs& inputs,
                          const Ranges& ranges,
                          const std::vector<std::vector<std::int64_t>>& output_strides,
                          const py::object& unflatten, const std::optional<py::dict>& plan,
                          bool differs_on_replicas, bool takes_objects, const Writes& writes,
                          bool checks, const std::vector<std::string>& contracts) {
  auto kernel = std::make_unique<ModuleKernel>();
  kernel->device = c10::Device(device);
  ModelContainer* model = kernel->model = open_source(source, kernel->device, 0, contracts);
  std::unique_ptr<const ModuleTraining> training;
  std::size_t num_drawn = 0;
  if (plan.has_value()) {
    ModelContainer* backward = open_source(source, kernel->device, 1, contracts);
    training = read_training_plan(*plan, model->num_inputs(), model->num_outputs(), backward);
    if (training->num_answers != output_strides.size()) {
      throw std::runtime_error("the training plan is for another number of outputs");
    }
    num_drawn = training->noise.size();
  }
  // A forward with gradients has more outputs, which its plan explains.
  const bool fits = plan.has_value() ? output_strides.size() <= model->num_outputs()
                                     : output_strides.size() + checks == model->num_outputs();
  if (inputs.size() + num_drawn != model->num_inputs() || !fits ||
      (unflatten.is_none() && (output_strides.size() != 1 || takes_objects))) {
    throw std::runtime_error("the kernel takes or returns another number of tensors");
  }
  for (const auto& [from_module, index] : inputs) {
    kernel->inputs.push_back({from_module, index});
  }
  for (const auto& [input, low, high, also] : ranges) {
    if (input >= inputs.size()) {
      throw std::runtime_error("an index range of no input");
    }
    kernel->ranges.push_back({input, low, high, also});
  }
  if (const auto* entry = std::get_if<Entry>(&source)) {
    kernel->digest = entry->second;
  }
  kernel->output_strides = output_strides;
  if (!unflatten.is_none()) {
    kernel->unflatten = unflatten;
  }
  kernel->training = training.release();
  kernel->differs_on_replicas = differs_on_replicas;
  kernel->takes_objects = takes_objects;
  read_writes(writes, *kernel);
  if (checks &&
      (kernel->training != nullptr || !kernel->writes.empty() || !kernel->device.is_cpu())) {
    throw std::runtime_error("the kernel checks itself where it must not");
  }
  kernel->checks = checks;
  return kernel.release();
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
         const py::object& unfit, const py::object& is_wrong, const py::object& name) {
        ModuleRegistry::instance().set_handlers({select, look, missed, unfit, is_wrong, name});
      },
      py::arg("select"), py::arg("look"), py::arg("missed"), py::arg("unfit"),
      py::arg("is_wrong") = py::none(), py::arg("name") = py::none());
  module.def(
      "difference_from_native",
      [](py::handle kernel, py::handle native) {
        return difference_from_native(THPVariable_Unpack(kernel.ptr()),
                                      THPVariable_Unpack(native.ptr()));
      },
      py::arg("kernel"), py::arg("native"));
  module.def("set_modules_active",
             [](bool active) { ModuleRegistry::instance().set_active(active); });
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
             py::arg("forget_forms") = false);
  module.def(
      "module_watch_values",
      [](py::handle object, const py::list& values) {
        require_record(object)->values->add(values);
      },
      py::arg("module"), py::arg("values"));
  module.def("module_values_changed",
             [](py::handle object) { return require_record(object)->values_changed; });
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
  py::class_<ModuleKernel, std::unique_ptr<ModuleKernel, py::nodelete>>(module, "ModuleKernel");
  module.def("load_module", &load_module, py::arg("source"), py::arg("device"), py::arg("inputs"),
             py::arg("ranges"), py::arg("output_strides"), py::arg("unflatten"),
             py::arg("plan") = py::none(), py::arg("differs_on_replicas") = false,
             py::arg("takes_objects") = false, py::arg("writes") = Writes(),
             py::arg("checks") = false, py::arg("contracts") = std::vector<std::string>(),
             py::return_value_policy::reference);
}

}  // namespace eagercache
