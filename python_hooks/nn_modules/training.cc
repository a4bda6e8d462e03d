#include "python_hooks/nn_modules/training.h"

#include <ATen/Functions.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "dispatcher/autograd/autograd_node.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/hook/thread_state.h"
#include "dispatcher/kernels/container_kernel.h"
#include "dispatcher/kernels/profile_event.h"
#include "guards/builder/key_builder.h"
#include "python_hooks/nn_modules/arguments.h"

namespace eagercache {
namespace {

namespace py = pybind11;

using torch::autograd::variable_list;

constexpr Word kGradientsTag = 0xF1;

// The state of autocast in which a forward ran.
using Autocast = std::vector<std::pair<std::string, c10::ScalarType>>;

py::object& eager_gradients() {
  static auto* const handler = new py::object();
  return *handler;
}

Autocast read_autocast() {
  Autocast state;
  for (const c10::DeviceType type : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    if (at::autocast::is_autocast_enabled(type)) {
      state.emplace_back(type == c10::DeviceType::CPU ? "cpu" : "cuda",
                         at::autocast::get_autocast_dtype(type));
    }
  }
  return state;
}

bool is_aligned(const at::Tensor& tensor) noexcept {
  return reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()->data()) % kAlignment == 0;
}

// Runs a container below autograd and autocast. Copies of the inputs' handles are the container's.
LoadedKernel::Outcome run_container(ModelContainer& model, const variable_list& inputs,
                                    variable_list& outputs, c10::Device device) {
  std::vector<ModelContainer::TensorHandle> handles;
  handles.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    handles.push_back(new at::Tensor(input));
  }
  outputs.assign(model.num_outputs(), at::Tensor());
  return model.run({handles.data(), handles.size()}, {outputs.data(), outputs.size()}, device);
}

// What holds around everything that is ours within a call.
struct BelowAutograd {
  const InsideGuard inside;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

bool is_alone(const at::Tensor& tensor) { return tensor.storage().use_count() == 1; }

at::Tensor in_layout(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes,
                     const std::vector<std::int64_t>& strides) {
  return at::empty_strided(sizes, strides, tensor.options()).copy_(tensor);
}

// What is left of an argument that a call does not keep.
struct ArgumentShell {
  explicit ArgumentShell(const at::Tensor& argument)
      : dtype(argument.scalar_type()),
        sizes(argument.sizes().vec()),
        strides(argument.strides().vec()),
        is_leaf(argument.is_leaf()) {
    if (argument.requires_grad()) {
      edge = torch::autograd::impl::gradient_edge(argument);
    }
  }

  // A tensor with the values of `saved` in the argument's place of the graph; zeros where nothing
  // is read.
  at::Tensor rebuild(const at::Tensor& saved,
                     const std::optional<ModuleTraining::Rebuilt::Part>& part) const {
    at::Tensor made;
    {
      const BelowAutograd below;
      made = at::empty_strided(sizes, strides, saved.options().dtype(dtype));
      if (part) {
        made.zero_().as_strided(part->sizes, part->strides, part->offset).copy_(saved);
      } else {
        made.copy_(saved);
      }
    }
    if (edge.is_valid() && is_leaf) {
      made.set_requires_grad(true);
      torch::autograd::impl::set_grad_accumulator(made, weak_node(edge.function));
    } else if (edge.is_valid()) {
      torch::autograd::impl::set_gradient_edge(made, edge);
    }
    return made;
  }

  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  bool is_leaf;
  torch::autograd::Edge edge;  // not valid: it needs no gradient
};

// What a program gets of one call: a node that keeps what the backward reads.
class ModuleNode final : public torch::autograd::Node {
 public:
  // `drawn_from`: the generator's state before the kernel, where that draws.
  ModuleNode(const ModuleKernel& kernel, std::vector<at::Tensor> inputs, py::tuple call,
             Autocast autocast, at::Tensor drawn_from)
      : kernel_(kernel),
        autocast_(std::move(autocast)),
        drawn_from_(std::move(drawn_from)),
        inputs_(std::move(inputs)),
        call_(call.release().ptr()) {
    versions_.reserve(inputs_.size());
    for (const at::Tensor& input : inputs_) {
      versions_.push_back(input._version());
    }
    for (const ModuleTraining::Gradient& gradient : plan().gradients) {
      add_next_edge(torch::autograd::impl::gradient_edge(inputs_[gradient.input]));
    }
    for (const ModuleTraining::Rebuilt& one : plan().rebuilt) {
      shells_.emplace_back(inputs_[one.input]);
      inputs_[one.input] = at::Tensor();
    }
  }

  ~ModuleNode() override { drop_call(); }
  ModuleNode(const ModuleNode&) = delete;
  ModuleNode& operator=(const ModuleNode&) = delete;

  // Keeps one tensor for the backward; `tensor` shares its version with what the program may write.
  void save(const at::Tensor& tensor) {
    const std::lock_guard lock(saved_mutex_);
    saved_.emplace_back(tensor, /*is_output=*/false);
  }

  variable_list apply(variable_list&& gradients) override {
    std::vector<bool> wanted;
    for (std::size_t i = 0; i < plan().gradients.size(); ++i) {
      wanted.push_back(task_should_compute_output(i));
    }
    if (std::ranges::none_of(wanted, [](bool needed) { return needed; })) {
      return variable_list(wanted.size());
    }
    if (!at::GradMode::is_enabled() && kernel_may_answer(gradients) && reads_all(gradients)) {
      variable_list results(wanted.size());
      if (answer(gradients, wanted, results)) {
        return results;
      }
    }
    return answer_by_eager(gradients, wanted);
  }

  void release_variables() override {
    std::vector<at::Tensor> inputs;
    std::vector<ArgumentShell> shells;
    {
      const std::lock_guard lock(saved_mutex_);
      released_ = true;
      for (torch::autograd::SavedVariable& variable : saved_) {
        variable.reset_data();
      }
      inputs.swap(inputs_);
      shells.swap(shells_);
    }
    drop_call();
  }

  std::string name() const override { return "EagercacheModuleBackward"; }

 private:
  const ModuleTraining& plan() const noexcept { return *kernel_.training; }

  // Never with the lock, which is not waited for with the GIL either.
  void drop_call() {
    if (Py_IsInitialized() != 0) {
      const py::gil_scoped_acquire gil;
      Py_XDECREF(std::exchange(call_, nullptr));
    }
  }

  bool reads_all(const variable_list& gradients) const {
    for (std::size_t i = 0; i < plan().tangents.size(); ++i) {
      if (plan().tangents[i].in_object && gradients[i].defined()) {
        return false;
      }
    }
    return true;
  }

  static bool kernel_may_answer(const variable_list& gradients) {
    return thread_state_reason() == AsideReason::kNone &&
           std::ranges::all_of(gradients, [](const at::Tensor& gradient) {
             return !gradient.defined() || is_plain(*gradient.unsafeGetTensorImpl());
           });
  }

  // Whether the kernel gave the gradients. Throws what autograd throws where a tensor that is read
  // has been written since, or was given up.
  bool answer(const variable_list& gradients, const std::vector<bool>& wanted,
              variable_list& results) {
    variable_list inputs;
    inputs.reserve(plan().saved.size() + gradients.size());
    {
      const std::lock_guard lock(saved_mutex_);
      TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
      for (const torch::autograd::SavedVariable& variable : saved_) {
        inputs.push_back(variable.unpack());
      }
    }
    const BelowAutograd below;
    for (std::size_t i = 0; i < plan().tangents.size(); ++i) {
      if (plan().tangents[i].in_object) {
        continue;
      }
      inputs.push_back(tangent(gradients[i], i));
      if (inputs.back().device() != kernel_.device) {
        return false;
      }
    }
    variable_list computed;
    {
      std::optional<ProfileEvent> event;
      if (std::optional<at::StepCallbacks> listeners = profile_listeners()) [[unlikely]] {
        event.emplace(std::move(*listeners), module_event_name("backward", kernel_.digest));
      }
      if (run_container(*plan().backward, inputs, computed, kernel_.device) !=
          LoadedKernel::Outcome::kAnswered) {
        return false;
      }
    }
    inputs.clear();
    for (std::size_t i = 0; i < computed.size(); ++i) {
      if (wanted[i] && is_reached(i, gradients)) {
        // Whoever accumulates it may take the memory for its own.
        results[i] = is_alone(computed[i]) ? std::move(computed[i]) : computed[i].clone();
        adopt_strides(results[i], plan().gradients[i].strides);
      }
    }
    return true;
  }

  // The gradient of an output in the layout that the backward reads; zeros where there is none.
  at::Tensor tangent(const at::Tensor& gradient, std::size_t index) const {
    const ModuleTraining::Tangent& wanted = plan().tangents[index];
    if (!gradient.defined()) {
      const torch::autograd::InputMetadata& output = input_metadata(index);
      return at::empty_strided(wanted.sizes, wanted.strides, output.options()).zero_();
    }
    const bool fits = gradient.sizes() == at::IntArrayRef(wanted.sizes) &&
                      gradient.strides() == at::IntArrayRef(wanted.strides) && is_aligned(gradient);
    return fits ? gradient : in_layout(gradient, wanted.sizes, wanted.strides);
  }

  // Autograd gives no gradient to what no defined one reaches.
  bool is_reached(std::size_t index, const variable_list& gradients) const {
    return std::ranges::any_of(plan().gradients[index].tangents, [&gradients](std::size_t tangent) {
      return gradients[tangent].defined();
    });
  }

  // By the module's own forward, run again, and autograd.
  variable_list answer_by_eager(const variable_list& gradients, const std::vector<bool>& wanted) {
    const py::gil_scoped_acquire gil;
    try {
      std::vector<at::Tensor> own;
      py::list rebuilt;
      {
        // The lock is never waited for with the GIL.
        const py::gil_scoped_release no_gil;
        own = whole_inputs();
      }
      TORCH_CHECK(call_ != nullptr && !own.empty(), torch::autograd::ERR_BACKWARD_TWICE);
      const auto call = py::reinterpret_borrow<py::tuple>(call_);
      check_versions(own);
      for (const ModuleTraining::Rebuilt& one : plan().rebuilt) {
        rebuilt.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(own[one.input])));
      }
      py::list masks;
      for (std::size_t i = own.size() - plan().noise.size(); i < own.size(); ++i) {
        masks.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(own[i])));
      }
      py::list inputs;
      for (const ModuleTraining::Gradient& gradient : plan().gradients) {
        inputs.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(own[gradient.input])));
      }
      py::list given;
      for (const at::Tensor& gradient : gradients) {
        given.append(gradient.defined()
                         ? py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient))
                         : py::object(py::none()));
      }
      py::dict autocast;
      for (const auto& [device, dtype] : autocast_) {
        autocast[py::str(device)] = py::cast(dtype);
      }
      const py::object drawn_from =
          drawn_from_.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(drawn_from_))
                                : py::object(py::none());
      const py::object answer =
          eager_gradients()(call[0], call[1], call[2], rebuilt, masks, drawn_from, plan().identity,
                            autocast, inputs, wanted, given);
      variable_list results;
      for (const py::handle& gradient : answer) {
        results.push_back(gradient.is_none() ? at::Tensor() : THPVariable_Unpack(gradient.ptr()));
      }
      return results;
    } catch (py::error_already_set& error) {
      // As autograd's own Python functions raise, from whatever thread.
      error.restore();
      python_error persistent;
      persistent.persist();
      throw persistent;
    }
  }

  // The inputs, those that are not kept made anew; none where they were given up.
  std::vector<at::Tensor> whole_inputs() {
    const std::lock_guard lock(saved_mutex_);
    std::vector<at::Tensor> inputs = inputs_;
    for (std::size_t i = 0; i < shells_.size(); ++i) {
      const ModuleTraining::Rebuilt& one = plan().rebuilt[i];
      inputs[one.input] = shells_[i].rebuild(saved_[one.saved].unpack(), one.part);
    }
    return inputs;
  }

  void check_versions(const std::vector<at::Tensor>& inputs) const {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool is_written = std::ranges::any_of(
          plan().buffers, [i](const ModuleTraining::Buffer& buffer) { return buffer.input == i; });
      const bool is_rebuilt = std::ranges::any_of(
          plan().rebuilt, [i](const ModuleTraining::Rebuilt& one) { return one.input == i; });
      TORCH_CHECK(is_written || is_rebuilt || inputs[i]._version() == versions_[i],
                  "one of the variables needed for gradient computation has been modified by an "
                  "inplace operation: an input or a parameter of a module, whose forward is run "
                  "again for this gradient");
    }
  }

  const ModuleKernel& kernel_;
  const Autocast autocast_;
  const at::Tensor drawn_from_;
  std::vector<std::int64_t> versions_;  // of inputs_
  std::mutex saved_mutex_;
  std::vector<torch::autograd::SavedVariable> saved_;  // guarded by saved_mutex_
  std::vector<at::Tensor> inputs_;                     // guarded by saved_mutex_
  std::vector<ArgumentShell> shells_;                  // of plan().rebuilt; guarded by saved_mutex_
  bool released_ = false;                              // guarded by saved_mutex_
  PyObject* call_;                                     // owned; guarded by the GIL
};

// Generated code for a GPU reads at once what lies so far apart at most, as it was compiled for.
constexpr std::uintptr_t kDeviceAlignment = 16;

bool is_read_as_planned(const at::Tensor& tensor) {
  return tensor.is_cpu() || reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()->data()) %
                                    kDeviceAlignment ==
                                0;
}

// The tensor to save for `made`. One that shows the memory of something that the program may write
// has the same version, where autograd's own would have had, or else memory of its own.
at::Tensor detached_from(const at::Tensor& made, const variable_list& answers,
                         const std::vector<at::Tensor>& inputs, const ModuleTraining& plan) {
  if (is_alone(made)) [[likely]] {
    return made;
  }
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (shares_memory(made, answers[i])) {
      if (!plan.keeps_output[i]) {
        return made.clone();
      }
      at::Tensor shown = made;
      torch::autograd::impl::set_version_counter(
          shown, torch::autograd::impl::version_counter(answers[i]));
      return shown;
    }
  }
  for (const at::Tensor& input : inputs) {
    if (shares_memory(made, input)) {
      return made.clone();
    }
  }
  return made;
}

// Writes what the module's own forward would have written.
void write_buffers(const ModuleTraining& plan, const std::vector<at::Tensor>& inputs,
                   const variable_list& outputs) {
  for (std::size_t i = 0; i < plan.buffers.size(); ++i) {
    const at::Tensor& buffer = inputs[plan.buffers[i].input];
    buffer.variable_data().copy_(outputs[plan.num_answers + i]);
    for (std::uint32_t step = 0; step < plan.buffers[i].steps; ++step) {
      torch::autograd::impl::bump_version(buffer);
    }
  }
}

// Whether what the forward made is laid out as the backward was compiled for.
bool is_as_planned(const ModuleTraining& plan, const variable_list& outputs) {
  const std::size_t first = plan.num_answers + plan.buffers.size();
  return std::ranges::all_of(plan.saved, [&](const ModuleTraining::Saved& saved) {
    if (saved.source == ModuleTraining::Source::kInput) {
      return true;
    }
    const bool is_made = saved.source == ModuleTraining::Source::kMade;
    const at::Tensor& tensor = outputs[(is_made ? first : 0) + saved.index];
    return tensor.defined() && tensor.sizes() == at::IntArrayRef(saved.sizes) &&
           tensor.strides() == at::IntArrayRef(saved.strides);
  });
}

void record(const ModuleKernel& kernel, std::vector<at::Tensor> inputs, py::tuple call,
            Autocast autocast, at::Tensor drawn_from, const variable_list& answers,
            variable_list made) {
  const ModuleTraining& plan = *kernel.training;
  variable_list saved;
  saved.reserve(plan.saved.size());
  for (const ModuleTraining::Saved& one : plan.saved) {
    switch (one.source) {
      case ModuleTraining::Source::kInput:
        saved.push_back(inputs[one.index]);
        break;
      case ModuleTraining::Source::kOutput:
        saved.push_back(answers[one.index].tensor_data());
        break;
      case ModuleTraining::Source::kMade:
        saved.push_back(std::move(made[one.index]));
        break;
    }
  }
  const auto node =
      make_node<ModuleNode>(kernel, std::move(inputs), std::move(call), std::move(autocast),
                            plan.draws ? std::move(drawn_from) : at::Tensor());
  for (const at::Tensor& tensor : saved) {
    node->save(tensor);
  }
  for (const ModuleTraining::Tangent& tangent : plan.tangents) {
    torch::autograd::set_history(answers[tangent.output], node);
  }
}

std::vector<std::size_t> indices(const py::handle& list, std::size_t limit) {
  auto values = py::cast<std::vector<std::size_t>>(list);
  if (std::ranges::any_of(values, [limit](std::size_t value) { return value >= limit; })) {
    throw std::invalid_argument("the training plan names a tensor that is not there");
  }
  return values;
}

std::size_t index(const py::handle& value, std::size_t limit) {
  const auto number = py::cast<std::size_t>(value);
  if (number >= limit) {
    throw std::invalid_argument("the training plan names a tensor that is not there");
  }
  return number;
}

ModuleTraining::Source read_source(const std::string& name) {
  if (name == "input") {
    return ModuleTraining::Source::kInput;
  }
  if (name == "output") {
    return ModuleTraining::Source::kOutput;
  }
  if (name != "made") {
    throw std::invalid_argument("the training plan saves " + name);
  }
  return ModuleTraining::Source::kMade;
}

}  // namespace

std::unique_ptr<const ModuleTraining> read_training_plan(const py::dict& plan,
                                                         std::size_t num_inputs,
                                                         std::size_t num_outputs,
                                                         ModelContainer* backward) {
  auto read = std::make_unique<ModuleTraining>();
  read->backward = backward;
  read->identity = py::cast<std::string>(plan["identity"]);
  read->keeps_output = py::cast<std::vector<bool>>(plan["keeps_output"]);
  read->num_answers = read->keeps_output.size();
  for (const py::handle& row : plan["buffers"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->buffers.push_back({index(fields[0], num_inputs), py::cast<std::uint32_t>(fields[1])});
  }
  const std::size_t before_made = read->num_answers + read->buffers.size();
  if (num_outputs < before_made) {
    throw std::invalid_argument("the training plan does not fit its forward");
  }
  read->num_made = num_outputs - before_made;
  for (const py::handle& row : plan["saved"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    const ModuleTraining::Source source = read_source(py::cast<std::string>(fields[0]));
    const std::size_t limit = source == ModuleTraining::Source::kInput    ? num_inputs
                              : source == ModuleTraining::Source::kOutput ? read->num_answers
                                                                          : read->num_made;
    read->saved.push_back({source, index(fields[1], limit),
                           py::cast<std::vector<std::int64_t>>(fields[2]),
                           py::cast<std::vector<std::int64_t>>(fields[3])});
  }
  for (const py::handle& row : plan["tangents"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->tangents.push_back(
        {index(fields[0], read->num_answers), py::cast<std::vector<std::int64_t>>(fields[1]),
         py::cast<std::vector<std::int64_t>>(fields[2]), py::cast<bool>(fields[3])});
  }
  for (const py::handle& row : plan["gradients"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    read->gradients.push_back({index(fields[0], num_inputs),
                               indices(fields[1], read->tangents.size()),
                               py::cast<std::vector<std::int64_t>>(fields[2])});
  }
  for (const py::handle& row : plan["rebuilt"]) {
    const py::tuple fields = py::cast<py::tuple>(row);
    std::optional<ModuleTraining::Rebuilt::Part> part;
    if (!fields[3].is_none()) {
      const py::tuple whole = py::cast<py::tuple>(fields[3]);
      part.emplace(py::cast<std::vector<std::int64_t>>(whole[0]),
                   py::cast<std::vector<std::int64_t>>(whole[1]), py::cast<std::int64_t>(whole[2]));
    }
    read->rebuilt.push_back(
        {index(fields[0], num_inputs), index(fields[1], read->saved.size()), std::move(part)});
    read->without.push_back(py::cast<std::size_t>(fields[2]));
  }
  read->noise = read_noise(plan["noise"]);
  read->draws = py::cast<bool>(plan["draws"]);
  if (read->noise.size() > num_inputs) {
    throw std::invalid_argument("the training plan draws more masks than its forward takes");
  }
  if (!std::ranges::is_sorted(read->without)) {
    throw std::invalid_argument("the training plan does not order its arguments");
  }
  const auto num_read = static_cast<std::size_t>(
      std::ranges::count(read->tangents, false, &ModuleTraining::Tangent::in_object));
  if (backward->num_inputs() != read->saved.size() + num_read ||
      backward->num_outputs() != read->gradients.size() || num_read == 0) {
    throw std::invalid_argument("the training plan does not fit its backward");
  }
  return read;
}

void put_gradients(const ModuleGuard& guard, ModuleCallForm& form) {
  const std::size_t own = guard.num_tensors();
  const std::size_t count = own + form.tensors.size();
  form.words.push_back(kGradientsTag | (static_cast<Word>(count) << 8));
  Word bits = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = i < own ? guard.tensor(i) : *form.tensors[i - own];
    bits |= static_cast<Word>(tensor.requires_grad()) << (i % 64);
    if (i % 64 == 63 || i + 1 == count) {
      form.words.push_back(std::exchange(bits, 0));
    }
  }
}

py::tuple kept_call(const ModuleTraining& plan, const py::handle& module, py::tuple args,
                    py::dict kwargs) {
  if (plan.without.empty()) [[likely]] {
    return py::make_tuple(module, std::move(args), std::move(kwargs));
  }
  std::size_t next = 0;
  const py::object given = without_tensors(args, plan.without, &next);
  return py::make_tuple(module, given, without_tensors(kwargs, plan.without, &next));
}

bool saved_tensors_are_watched() { return at::SavedTensorDefaultHooks::get_hooks().has_value(); }

bool may_be_recorded(const ModuleKernel& kernel, const std::vector<at::Tensor>& inputs) {
  if (std::ranges::any_of(inputs, [](const at::Tensor& input) {
        return input.is_inference() || input._fw_grad(/*level=*/0).defined();
      })) {
    return false;
  }
  // An argument that shows a buffer's memory would change with it.
  return std::ranges::none_of(kernel.training->buffers, [&](const ModuleTraining::Buffer& buffer) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (i != buffer.input && shares_memory(inputs[i], inputs[buffer.input])) {
        return true;
      }
    }
    return false;
  });
}

LoadedKernel::Outcome answer_with_gradients(const ModuleKernel& kernel,
                                            std::vector<at::Tensor> inputs, py::tuple call,
                                            c10::SmallVector<at::Tensor, 4>& answers) {
  const ModuleTraining& plan = *kernel.training;
  const py::gil_scoped_release no_gil;
  // Masks that were drawn before a kernel in a captured graph were not the same again when the
  // graph was replayed from the same seed: there the module's own forward is captured.
  if ((plan.draws || !plan.noise.empty()) && is_capturing(kernel.device)) {
    return LoadedKernel::Outcome::kNotStarted;
  }
  Autocast autocast = read_autocast();
  variable_list given;
  variable_list made;
  at::Tensor drawn_from;
  {
    const BelowAutograd below;
    DrawnMasks masks(plan.noise, plan.draws, kernel.device, inputs);
    if (!masks.drawn()) {
      return LoadedKernel::Outcome::kNotStarted;
    }
    variable_list outputs;
    const LoadedKernel::Outcome outcome =
        run_container(*kernel.model, inputs, outputs, kernel.device);
    if (outcome != LoadedKernel::Outcome::kAnswered) {
      return outcome;
    }
    if (!is_as_planned(plan, outputs)) {
      return LoadedKernel::Outcome::kFailed;
    }
    for (std::size_t i = 0; i < plan.num_answers; ++i) {
      adopt_strides(outputs[i], kernel.output_strides[i]);
      given.push_back(std::move(outputs[i]));
    }
    for (std::size_t i = 0; i < plan.num_made; ++i) {
      const at::Tensor& own = outputs[plan.num_answers + plan.buffers.size() + i];
      made.push_back(is_read_as_planned(own)
                         ? detached_from(own, given, inputs, plan)
                         : in_layout(own, own.sizes().vec(), own.strides().vec()));
    }
    write_buffers(plan, inputs, outputs);
    drawn_from = masks.use();
  }
  record(kernel, std::move(inputs), std::move(call), std::move(autocast), std::move(drawn_from),
         given, std::move(made));
  for (at::Tensor& answer : given) {
    answers.push_back(std::move(answer));
  }
  return LoadedKernel::Outcome::kAnswered;
}

void set_eager_gradients(const py::object& handler) { eager_gradients() = handler; }

}  // namespace eagercache
