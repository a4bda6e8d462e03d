#include "python_hooks/bindings/module_kernel_binding.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "dispatcher/plans/contract.h"
#include "kernel_cache/loading/shared_library.h"
#include "kernel_cache/store/disk_store.h"
#include "python_hooks/bindings/without_gil.h"
#include "python_hooks/nn_modules/record.h"
#include "python_hooks/nn_modules/training/training_plan.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// More inputs than any model has parameters.
constexpr std::size_t kMaxInputs = 1 << 16;
constexpr std::size_t kMaxOutputs = 1 << 10;

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

// (whether it is a slot of the guard, its index or that of the tensor among the arguments, how
// often) of those that a kernel writes into.
using Writes = std::vector<std::tuple<bool, std::size_t, std::uint32_t>>;

void read_writes(const Writes& writes, ModuleKernel& kernel) {
  for (const auto& [from_module, index, times] : writes) {
    const auto found = std::ranges::find(kernel.inputs, ModuleKernel::Input{from_module, index});
    if (found == kernel.inputs.end() || !(from_module || kernel.takes_objects) ||
        kernel.training != nullptr) {
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
                          bool checks, const std::vector<std::string>& contracts,
                          const py::list& noise, const std::vector<std::size_t>& stores,
                          const std::vector<std::size_t>& given) {
  auto kernel = std::make_unique<ModuleKernel>();
  kernel->device = c10::Device(device);
  ModelContainer* model = kernel->model = open_source(source, kernel->device, 0, contracts);
  std::unique_ptr<const ModuleTraining> training;
  kernel->noise = read_noise(noise);
  std::size_t num_drawn = kernel->noise.size();
  if (plan.has_value()) {
    ModelContainer* backward = open_source(source, kernel->device, 1, contracts);
    training = read_training_plan(*plan, model->num_inputs(), model->num_outputs(), backward);
    if (training->num_answers != output_strides.size()) {
      throw std::runtime_error("the training plan is for another number of outputs");
    }
    num_drawn += training->noise.size();
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
  kernel->num_plan_sizes = training != nullptr ? count_sizes(*training) : 0;
  kernel->training = training.release();
  kernel->differs_on_replicas = differs_on_replicas;
  kernel->takes_objects = takes_objects;
  if (!(stores.empty() && given.empty()) && !takes_objects) {
    throw std::runtime_error("the kernel assigns to attributes and builds no answer");
  }
  kernel->stores = stores;
  kernel->given = given;
  read_writes(writes, *kernel);
  if (checks &&
      (kernel->training != nullptr || !kernel->writes.empty() || !kernel->device.is_cpu())) {
    throw std::runtime_error("the kernel checks itself where it must not");
  }
  kernel->checks = checks;
  return kernel.release();
}

}  // namespace

void bind_module_kernels(py::module_& module) {
  py::class_<ModuleKernel, std::unique_ptr<ModuleKernel, py::nodelete>>(module, "ModuleKernel");
  module.def("load_module", &load_module, py::arg("source"), py::arg("device"), py::arg("inputs"),
             py::arg("ranges"), py::arg("output_strides"), py::arg("unflatten"),
             py::arg("plan") = py::none(), py::arg("differs_on_replicas") = false,
             py::arg("takes_objects") = false, py::arg("writes") = Writes(),
             py::arg("checks") = false, py::arg("contracts") = std::vector<std::string>(),
             py::arg("noise") = py::list(), py::arg("stores") = std::vector<std::size_t>(),
             py::arg("given") = std::vector<std::size_t>(), py::return_value_policy::reference);
}

}  // namespace eagercache
