#include "python_hooks/nn_modules/training/training.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "dispatcher/autograd/autograd_node.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/kernels/container_kernel.h"
#include "python_hooks/nn_modules/arguments.h"
#include "python_hooks/nn_modules/objects.h"
#include "python_hooks/nn_modules/training/part_node.h"
#include "python_hooks/nn_modules/training/training_node.h"

namespace eagercache {
namespace {

namespace py = pybind11;

using torch::autograd::variable_list;

constexpr Word kGradientsTag = 0xF1;

bool shares_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

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

// Parts of one tensor, as `chunk` gives them, have one version: where one is written in place,
// those who saved another raise as they do for autograd's own views.
void share_versions(const variable_list& answers) {
  for (std::size_t i = 1; i < answers.size(); ++i) {
    for (std::size_t j = 0; j < i && !is_alone(answers[i]); ++j) {
      if (shares_memory(answers[i], answers[j])) {
        torch::autograd::impl::set_version_counter(
            answers[i], torch::autograd::impl::version_counter(answers[j]));
        break;
      }
    }
  }
}

// Makes autograd's views of those answers that are some of others: their gradients are its own
// matter.
void show_views(const ModuleTraining& plan, variable_list& answers) {
  for (const ModuleTraining::View& view : plan.views) {
    const at::Tensor& own = answers[view.output];
    answers[view.output] = answers[view.of].as_strided(own.sizes(), own.strides(), view.offset);
  }
}

// What the buffers hold that the forward reads and writes, in their order.
variable_list read_buffers(const ModuleTraining& plan, const std::vector<at::Tensor>& inputs) {
  variable_list values;
  for (const ModuleTraining::Buffer& buffer : plan.buffers) {
    if (buffer.is_read) {
      values.push_back(inputs[buffer.input].clone());
    }
  }
  return values;
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

void record(const ModuleKernel& kernel, const std::shared_ptr<const ModuleTraining>& sized,
            std::vector<at::Tensor> inputs, py::tuple call, Autocast autocast,
            at::Tensor drawn_from, variable_list before, const variable_list& answers,
            variable_list made) {
  const ModuleTraining& plan = *sized;
  variable_list saved;
  saved.reserve(plan.saved.size());
  const std::size_t kept = num_kept(plan, inputs.size());
  for (const ModuleTraining::Saved& one : plan.saved) {
    switch (one.source) {
      case ModuleTraining::Source::kInput:
        saved.push_back(one.index < kept ? inputs[one.index] : at::Tensor());
        break;
      case ModuleTraining::Source::kOutput:
        saved.push_back(answers[one.index].tensor_data());
        break;
      case ModuleTraining::Source::kMade:
        saved.push_back(std::move(made[one.index]));
        break;
    }
  }
  const auto node = make_node<ModuleNode>(
      kernel, sized, std::move(inputs), std::move(call), std::move(autocast),
      plan.draws || plan.redraws ? std::move(drawn_from) : at::Tensor(), std::move(before));
  for (const at::Tensor& tensor : saved) {
    node->save(tensor);
  }
  set_histories({node, 0}, plan, answers);
}

}  // namespace

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
                    py::dict kwargs, bool has_objects, std::uint64_t values_changes) {
  if (plan.without.empty() && !has_objects) [[likely]] {
    return py::make_tuple(module, std::move(args), std::move(kwargs), values_changes);
  }
  std::size_t next = 0;
  const py::object given = without_tensors(args, plan.without, &next);
  return py::make_tuple(module, given, without_tensors(kwargs, plan.without, &next),
                        values_changes);
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
                                            const std::shared_ptr<const ModuleTraining>& sized,
                                            const std::vector<std::vector<std::int64_t>>& strides,
                                            std::vector<at::Tensor> inputs, py::tuple call,
                                            c10::SmallVector<at::Tensor, 4>& answers) {
  const ModuleTraining& plan = *sized;
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
  variable_list before;
  {
    const BelowAutograd below;
    DrawnMasks masks(plan.noise, plan.draws || plan.redraws, kernel.device, inputs);
    if (!masks.drawn()) {
      return LoadedKernel::Outcome::kNotStarted;
    }
    variable_list outputs;
    const LoadedKernel::Outcome outcome =
        run_training_container(*kernel.model, inputs, outputs, kernel.device);
    if (outcome != LoadedKernel::Outcome::kAnswered) {
      return outcome;
    }
    if (!is_as_planned(plan, outputs)) {
      return LoadedKernel::Outcome::kFailed;
    }
    for (std::size_t i = 0; i < plan.num_answers; ++i) {
      adopt_strides(outputs[i], strides[i]);
      given.push_back(std::move(outputs[i]));
    }
    share_versions(given);
    for (std::size_t i = 0; i < plan.num_made; ++i) {
      const at::Tensor& own = outputs[plan.num_answers + plan.buffers.size() + i];
      made.push_back(is_read_as_planned(own)
                         ? detached_from(own, given, inputs, plan)
                         : in_layout(own, own.sizes().vec(), own.strides().vec()));
    }
    before = read_buffers(plan, inputs);
    write_buffers(plan, inputs, outputs);
    drawn_from = masks.use();
  }
  record(kernel, sized, std::move(inputs), std::move(call), std::move(autocast),
         std::move(drawn_from), std::move(before), given, std::move(made));
  show_views(plan, given);
  for (at::Tensor& answer : given) {
    answers.push_back(std::move(answer));
  }
  return LoadedKernel::Outcome::kAnswered;
}

}  // namespace eagercache
