#include "python_hooks/nn_modules/training/training_node.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>

#include "dispatcher/autograd/autograd_node.h"
#include "dispatcher/hook/thread_state.h"
#include "dispatcher/kernels/container_kernel.h"
#include "dispatcher/kernels/profile_event.h"
#include "guards/builder/key_builder.h"
#include "python_hooks/nn_modules/arguments.h"

namespace eagercache {
namespace {

namespace py = pybind11;

using torch::autograd::variable_list;

bool is_aligned(const at::Tensor& tensor) noexcept {
  return reinterpret_cast<std::uintptr_t>(tensor.unsafeGetTensorImpl()->data()) % kAlignment == 0;
}

// Whether a tensor of these strides has one element in several places: nothing can be copied into
// it.
bool is_expanded(const std::vector<std::int64_t>& strides) {
  return std::ranges::any_of(strides, [](std::int64_t stride) { return stride == 0; });
}

bool kernel_may_answer(const variable_list& gradients) {
  return thread_state_reason() == AsideReason::kNone &&
         std::ranges::all_of(gradients, [](const at::Tensor& gradient) {
           return !gradient.defined() || is_plain(*gradient.unsafeGetTensorImpl());
         });
}

// {"arg0_1": "kept for the backward, float32[8, 16]", "arg1_1": "gradient of output 0, float32[8,
// 16]"}; empty where the kernel's library tells no names. `inputs`: as the container gets them.
ProfileEvent::Arguments shown_backward_arguments(const ModuleTraining& plan,
                                                 const torch::autograd::variable_list& inputs) {
  std::vector<std::string> origins(plan.saved.size(), "kept for the backward");
  for (const ModuleTraining::Tangent& tangent : plan.tangents) {
    if (!tangent.in_object) {
      origins.push_back("gradient of output " + std::to_string(tangent.output));
    }
  }
  ProfileEvent::Arguments shown;
  const std::vector<std::string> names = plan.backward->input_names();
  if (names.size() == inputs.size() && names.size() == origins.size()) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      shown[names[i]] = shown_tensor(origins[i], inputs[i]);
    }
  }
  return shown;
}

// Throws nothing: where memory is out the profile lacks one event.
void begin_backward_event(std::optional<ProfileEvent>& event, at::StepCallbacks&& listeners,
                          const ModuleKernel& kernel,
                          const torch::autograd::variable_list& inputs) noexcept {
  try {
    std::vector<const at::Tensor*> tensors;
    ProfileEvent::Arguments arguments;
    if (listeners.needs_inputs_) {
      std::transform(inputs.begin(), inputs.end(), std::back_inserter(tensors),
                     [](const at::Tensor& tensor) { return &tensor; });
      arguments = shown_backward_arguments(*kernel.training, inputs);
    }
    event.emplace(std::move(listeners), module_event_name("backward", kernel.digest), tensors, -1,
                  arguments);
  } catch (...) {
  }
}

}  // namespace

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

LoadedKernel::Outcome run_training_container(ModelContainer& model, variable_list inputs,
                                             variable_list& outputs, c10::Device device) {
  std::vector<ModelContainer::TensorHandle> handles;
  handles.reserve(inputs.size());
  for (at::Tensor& input : inputs) {
    handles.push_back(new at::Tensor(std::move(input)));
  }
  outputs.assign(model.num_outputs(), at::Tensor());
  return model.run({handles.data(), handles.size()}, {outputs.data(), outputs.size()}, device);
}

bool is_alone(const at::Tensor& tensor) { return tensor.storage().use_count() == 1; }

at::Tensor in_layout(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes,
                     const std::vector<std::int64_t>& strides) {
  return at::empty_strided(sizes, strides, tensor.options()).copy_(tensor);
}

std::size_t num_kept(const ModuleTraining& plan, std::size_t num_inputs) {
  return plan.redraws ? num_inputs - plan.noise.size() : num_inputs;
}

ArgumentShell::ArgumentShell(const at::Tensor& argument)
    : dtype(argument.scalar_type()),
      sizes(argument.sizes().vec()),
      strides(argument.strides().vec()),
      is_leaf(argument.is_leaf()) {
  if (argument.requires_grad()) {
    edge = torch::autograd::impl::gradient_edge(argument);
  }
}

at::Tensor ArgumentShell::rebuild(const at::Tensor& saved,
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

ModuleNode::ModuleNode(const ModuleKernel& kernel, std::shared_ptr<const ModuleTraining> plan,
                       std::vector<at::Tensor> inputs, py::tuple call, Autocast autocast,
                       at::Tensor drawn_from, variable_list before)
    : kernel_(kernel),
      plan_(std::move(plan)),
      autocast_(std::move(autocast)),
      drawn_from_(std::move(drawn_from)),
      inputs_(std::move(inputs)),
      before_(std::move(before)),
      call_(call.release().ptr()) {
  versions_.reserve(inputs_.size());
  needed_.reserve(inputs_.size());
  for (const at::Tensor& input : inputs_) {
    versions_.push_back(input._version());
    needed_.push_back(input.requires_grad());
  }
  for (const ModuleTraining::Gradient& gradient : plan_->gradients) {
    add_next_edge(torch::autograd::impl::gradient_edge(inputs_[gradient.input]));
  }
  for (const ModuleTraining::Rebuilt& one : plan_->rebuilt) {
    shells_.emplace_back(inputs_[one.input]);
    inputs_[one.input] = at::Tensor();
  }
  for (std::size_t i = num_kept(*plan_, inputs_.size()); i < inputs_.size(); ++i) {
    inputs_[i] = at::Tensor();
  }
}

void ModuleNode::save(const at::Tensor& tensor) {
  const Lock lock(saved_mutex_);
  saved_.emplace_back(tensor, /*is_output=*/false);
}

variable_list ModuleNode::apply(variable_list&& gradients) {
  const std::vector<std::size_t> whole = take_counted(gradients);
  std::vector<bool> wanted;
  for (std::size_t i = 0; i < plan().gradients.size(); ++i) {
    wanted.push_back(task_should_compute_output(i));
  }
  if (std::ranges::none_of(wanted, [](bool needed) { return needed; })) {
    return variable_list(wanted.size());
  }
  if (whole.empty() && !at::GradMode::is_enabled() && kernel_may_answer(gradients) &&
      reads_all(gradients)) {
    variable_list results(wanted.size());
    if (answer(gradients, wanted, results)) {
      return results;
    }
  }
  return answer_by_eager(gradients, wanted, {}, whole);
}

std::vector<std::size_t> ModuleNode::take_counted(variable_list& gradients) const {
  std::vector<std::size_t> counted;
  bool is_changed = false;
  for (std::size_t i = 0; i < plan().tangents.size(); ++i) {
    const std::optional<std::size_t> place = plan().tangents[i].counted;
    if (place && gradients[*place].defined()) [[unlikely]] {
      counted.push_back(i);
      is_changed = is_changed || !gradients[i].is_same(gradients[*place]);
    }
  }
  gradients.resize(plan().tangents.size());
  if (!is_changed) {
    for (const std::size_t i : counted) {
      gradients[i] = at::Tensor();
    }
    counted.clear();
  }
  return counted;
}

void ModuleNode::release_variables() {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> before;
  std::vector<ArgumentShell> shells;
  {
    const Lock lock(saved_mutex_);
    released_ = true;
    for (torch::autograd::SavedVariable& variable : saved_) {
      variable.reset_data();
    }
    inputs.swap(inputs_);
    before.swap(before_);
    shells.swap(shells_);
  }
  drop_call();
}

void ModuleNode::drop_call() {
  if (Py_IsInitialized() != 0) {
    const py::gil_scoped_acquire gil;
    Py_XDECREF(std::exchange(call_, nullptr));
  }
}

bool ModuleNode::reads_all(const variable_list& gradients) const {
  for (std::size_t i = 0; i < plan().tangents.size(); ++i) {
    if (plan().tangents[i].in_object && gradients[i].defined()) {
      return false;
    }
  }
  return true;
}

bool ModuleNode::answer(const variable_list& gradients, const std::vector<bool>& wanted,
                        variable_list& results) {
  variable_list inputs;
  inputs.reserve(plan().saved.size() + gradients.size());
  if (!unpack_saved(inputs)) {
    return false;
  }
  const BelowAutograd below;
  if (plan().redraws) {
    const std::vector<at::Tensor> masks = draw_again(plan().noise, kernel_.device, drawn_from_);
    const std::size_t first = num_kept(plan(), needed_.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const ModuleTraining::Saved& one = plan().saved[i];
      if (one.source == ModuleTraining::Source::kInput && one.index >= first) {
        inputs[i] = masks[one.index - first];
      }
    }
  }
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
      begin_backward_event(event, std::move(*listeners), kernel_, inputs);
    }
    if (run_training_container(*plan().backward, std::move(inputs), computed, kernel_.device) !=
        LoadedKernel::Outcome::kAnswered) {
      return false;
    }
  }
  for (std::size_t i = 0; i < computed.size(); ++i) {
    if (wanted[i] && is_reached(i, gradients)) {
      // Whoever accumulates it may take the memory for its own.
      results[i] = is_alone(computed[i]) ? std::move(computed[i]) : computed[i].clone();
      const std::vector<std::int64_t>& strides = plan().gradients[i].strides;
      adopt_strides(results[i], strides);
      if (results[i].strides() != at::IntArrayRef(strides) && !is_expanded(strides)) [[unlikely]] {
        results[i] = in_layout(results[i], results[i].sizes().vec(), strides);
      }
    }
  }
  return true;
}

bool ModuleNode::unpack_saved(variable_list& inputs) {
  const Lock lock(saved_mutex_);
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  if (gave_up_saved_) {
    return false;
  }
  for (const torch::autograd::SavedVariable& variable : saved_) {
    inputs.push_back(variable.unpack());
  }
  if (torch::autograd::get_current_graph_task_keep_graph()) {
    return true;
  }
  gave_up_saved_ = true;
  std::vector<bool> needed(saved_.size());
  for (const ModuleTraining::Rebuilt& one : plan().rebuilt) {
    needed[one.saved] = true;
  }
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    if (!needed[i]) {
      saved_[i].reset_data();
    }
  }
  return true;
}

at::Tensor ModuleNode::tangent(const at::Tensor& gradient, std::size_t index) const {
  const ModuleTraining::Tangent& wanted = plan().tangents[index];
  if (!gradient.defined()) {
    const torch::autograd::InputMetadata& output = input_metadata(index);
    return at::empty_strided(wanted.sizes, wanted.strides, output.options()).zero_();
  }
  const bool fits = gradient.sizes() == at::IntArrayRef(wanted.sizes) &&
                    gradient.strides() == at::IntArrayRef(wanted.strides) && is_aligned(gradient);
  return fits ? gradient : in_layout(gradient, wanted.sizes, wanted.strides);
}

bool ModuleNode::is_reached(std::size_t index, const variable_list& gradients) const {
  return std::ranges::any_of(plan().gradients[index].tangents, [&gradients](std::size_t tangent) {
    return gradients[tangent].defined();
  });
}

}  // namespace eagercache
