#include "python_hooks/nn_modules/call/kernel_answer.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "dispatcher/base/index_range.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/device/device_stream.h"
#include "dispatcher/hook/call_trials.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/kernels/container_kernel.h"
#include "dispatcher/kernels/numerics_rule.h"
#include "dispatcher/observe/verification.h"
#include "python_hooks/nn_modules/noise.h"
#include "python_hooks/nn_modules/objects.h"
#include "python_hooks/nn_modules/registry.h"
#include "python_hooks/nn_modules/training/training.h"
#include "python_hooks/nn_modules/writes.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// The container's inputs, as handles that own a reference each: other threads may replace a
// parameter while the GIL is released.
c10::SmallVector<ModelContainer::TensorHandle, 64> take_inputs(const ModuleKernel& kernel,
                                                               const ModuleGuard& guard,
                                                               const ModuleCallForm& form) {
  c10::SmallVector<ModelContainer::TensorHandle, 64> handles;
  for (const ModuleKernel::Input& input : kernel.inputs) {
    handles.push_back(new at::Tensor(input_of(input, guard, form)));
  }
  return handles;
}

using Outputs = c10::SmallVector<at::Tensor, 4>;

PyObject* wrap_outputs(const ModuleKernel& kernel, const ModuleShapeClass::Strides& strides,
                       const py::tuple& changed, Outputs& outputs) {
  for (std::size_t i = 0; i < outputs.size() && i < strides.size(); ++i) {
    adopt_strides(outputs[i], strides[i]);
  }
  if (!kernel.unflatten) {
    return THPVariable_Wrap(std::move(outputs[0]));
  }
  py::list list(outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    list[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(outputs[i])));
  }
  if (!kernel.takes_objects) {
    return PyObject_CallOneArg(kernel.unflatten.ptr(), list.ptr());
  }
  return PyObject_CallFunctionObjArgs(kernel.unflatten.ptr(), list.ptr(), changed.ptr(), nullptr);
}

// What a call draws before its kernel runs; `tensors` go behind the other `inputs`. These are taken
// before: the GIL is released meanwhile, and the guard may be another one then.
struct Drawn {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> tensors;
  std::optional<DrawnMasks> masks;
};

// Whether all is drawn, if there is anything to be.
bool draw(const ModuleKernel& kernel, const ModuleGuard& guard, const ModuleCallForm& form,
          Drawn& drawn) {
  if (kernel.noise.empty()) [[likely]] {
    return true;
  }
  if (is_capturing(kernel.device)) {  // as in answer_with_gradients
    return false;
  }
  for (const ModuleKernel::Input& input : kernel.inputs) {
    drawn.inputs.push_back(input_of(input, guard, form));
  }
  const py::gil_scoped_release no_gil;
  const InsideGuard inside;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  drawn.masks.emplace(kernel.noise, false, kernel.device, drawn.tensors);
  return drawn.masks->drawn();
}

LoadedKernel::Outcome run_container(ModuleKernel& kernel, const ModuleGuard& guard,
                                    const ModuleCallForm& form, const Drawn& drawn,
                                    Outputs& outputs) {
  c10::SmallVector<ModelContainer::TensorHandle, 64> handles;
  if (kernel.noise.empty()) {
    handles = take_inputs(kernel, guard, form);
  }
  for (const auto* tensors : {&drawn.inputs, &drawn.tensors}) {
    for (const at::Tensor& tensor : *tensors) {
      handles.push_back(new at::Tensor(tensor));
    }
  }
  const py::gil_scoped_release no_gil;
  const InsideGuard inside;
  const CallersGradMode callers;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return kernel.model->run({handles.data(), handles.size()}, {outputs.data(), outputs.size()},
                           kernel.device);
}

LoadedKernel::Outcome replay(const ContainerGraph& graph, std::span<const at::Tensor* const> inputs,
                             Outputs& outputs) {
  // Other threads may replace a parameter while the GIL is released.
  c10::SmallVector<at::Tensor, 64> held;
  for (const at::Tensor* input : inputs) {
    held.push_back(*input);
  }
  const py::gil_scoped_release no_gil;
  return graph.launch(inputs, {outputs.data(), outputs.size()});
}

// Runs the container of a kernel on a GPU, or what was captured of such a call.
LoadedKernel::Outcome run_or_replay(ModuleKernel& kernel, const ModuleGuard& guard,
                                    const ModuleCallForm& form, const Drawn& drawn,
                                    Outputs& outputs) {
  void* stream = nullptr;
  if (!current_stream(kernel.device, &stream)) {
    return LoadedKernel::Outcome::kNotStarted;
  }
  // A replay would leave out what operators do on the host, and draw nothing.
  if (kernel.model->calls_operators() || !kernel.noise.empty()) {
    return run_container(kernel, guard, form, drawn, outputs);
  }
  c10::SmallVector<const at::Tensor*, 64> inputs;
  for (const ModuleKernel::Input& input : kernel.inputs) {
    inputs.push_back(&input_of(input, guard, form));
  }
  const ModuleReplays::Plan plan =
      kernel.replays.plan(kernel, {form.words.data(), form.words.size()}, inputs, stream);
  LoadedKernel::Outcome outcome = LoadedKernel::Outcome::kNotStarted;
  if (plan.graph != nullptr) {
    outcome = replay(*plan.graph, inputs, outputs);
  }
  if (outcome == LoadedKernel::Outcome::kAnswered) {
    kernel.replays.note_replayed();
  } else if (outcome == LoadedKernel::Outcome::kNotStarted || kernel.writes.empty()) {
    outcome = run_container(kernel, guard, form, drawn, outputs);
  }
  if (plan.trial != nullptr) {
    plan.trial->end(plan.timed, stream);
  }
  return outcome;
}

// The kernel's answer, or nullptr without an exception when the forward has to answer.
PyObject* run_kernel(ModuleKernel& kernel, const ModuleShapeClass::Strides& strides,
                     const ModuleGuard& guard, const ModuleCallForm& form, bool* failed) {
  // Once the GIL was released the guard may be another one, of other tensors.
  const auto written = written_tensors(kernel, guard, form);
  const py::tuple changed = changed_objects(kernel, guard, form);
  Drawn drawn;
  if (!draw(kernel, guard, form, drawn)) [[unlikely]] {
    return nullptr;
  }
  Outputs outputs(kernel.model->num_outputs());
  const LoadedKernel::Outcome outcome = kernel.device.is_cuda() && replays_are_made()
                                            ? run_or_replay(kernel, guard, form, drawn, outputs)
                                            : run_container(kernel, guard, form, drawn, outputs);
  *failed = outcome == LoadedKernel::Outcome::kFailed;
  if (outcome != LoadedKernel::Outcome::kAnswered) {
    return nullptr;
  }
  if (kernel.checks) {
    const at::Tensor inside = outputs.back();
    outputs.pop_back();
    if (inside.numel() != 1 || inside.scalar_type() != at::kBool ||
        !*inside.const_data_ptr<bool>()) {
      return nullptr;  // the forward raises what there is to raise
    }
  }
  move_versions(kernel, written);
  PyObject* const answer = wrap_outputs(kernel, strides, changed, outputs);
  if (answer != nullptr && drawn.masks) {
    drawn.masks->use();
  }
  return answer;
}

// The same for a call that needs gradients.
PyObject* run_training_kernel(const ModuleRecord& record, const ModuleKernel& kernel,
                              const ModuleShapeClass::Layout* layout, const ModuleCallForm& form,
                              const ModuleCall& call, bool* failed) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(kernel.inputs.size());
  for (const ModuleKernel::Input& input : kernel.inputs) {
    inputs.push_back(input_of(input, *record.guard, form));
  }
  if (!may_be_recorded(kernel, inputs)) {
    return nullptr;
  }
  const py::tuple changed = changed_objects(kernel, *record.guard, form);
  py::tuple whole = kept_call(*kernel.training, call.args[0], call.positional(), call.keywords(),
                              !form.objects.empty(), record.values_changes);
  c10::SmallVector<at::Tensor, 4> answers;
  const ModuleShapeClass::Strides& strides =
      layout == nullptr ? kernel.output_strides : layout->strides;
  // The kernel's own plan is never destroyed.
  const std::shared_ptr<const ModuleTraining> plan =
      layout == nullptr
          ? std::shared_ptr<const ModuleTraining>(std::shared_ptr<void>(), kernel.training)
          : with_sizes(*kernel.training, layout->numbers);
  const LoadedKernel::Outcome outcome =
      answer_with_gradients(kernel, plan, strides, std::move(inputs), std::move(whole), answers);
  *failed = outcome == LoadedKernel::Outcome::kFailed;
  return outcome == LoadedKernel::Outcome::kAnswered
             ? wrap_outputs(kernel, strides, changed, answers)
             : nullptr;
}

// Asks the forward too. A new reference to what is right; nullptr where the forward raised.
PyObject* verified(ModuleRecord& record, const ModuleKernel& kernel, const ModuleCall& call,
                   PyObject* answer) {
  const py::object mine = py::reinterpret_steal<py::object>(answer);
  const InsideGuard inside;  // native answers operators
  modules_step_aside(true);
  const py::object expected = py::reinterpret_steal<py::object>(call.forward());
  modules_step_aside(false);
  if (!expected) {
    ++record.native;
    return nullptr;  // with what it raised
  }
  const ModuleRegistry& registry = ModuleRegistry::instance();
  const py::object wrong = call_handler(registry.handlers().is_wrong, py::handle(call.args[0]),
                                        py::str(kernel.digest), mine, expected);
  if (wrong.ptr() == Py_False) {
    ++record.hits;
    return mine.inc_ref().ptr();
  }
  if (wrong.ptr() == Py_True) {
    for (const std::shared_ptr<ModuleRecord>& other : registry.records()) {
      other->drop(kernel);
    }
  }
  ++record.native;
  return expected.inc_ref().ptr();
}

// The turn of this call in its kernel's trial (call_trials.h). What looking the kernel up takes
// counts against it, so that a timed call of it is the next one, from its beginning. Not those that
// need gradients, whose backward comes later, nor of kernels with open sizes, whose times differ.
TrialTurn turn_of(ModuleRecord& record, ModuleKernel& kernel, const ModuleCall& call) noexcept {
  if (++kernel.calls < kernel.trial_at) [[likely]] {
    return TrialTurn::kNone;
  }
  const bool tried = kernel.device.is_cpu() && kernel.training == nullptr &&
                     kernel.shape == nullptr && !kernel.digest.empty();
  const TrialTurn turn =
      tried ? call_trials::next(call_trials::kModuleTrials, std::hash<std::string>{}(kernel.digest))
            : TrialTurn::kNone;
  if (turn == TrialTurn::kKernel && call.began == 0) {
    record.timed_next = true;
    return TrialTurn::kNone;
  }
  if (turn == TrialTurn::kNative && !kernel.warmed) {
    kernel.warmed = true;
    return TrialTurn::kWarm;
  }
  kernel.warmed = false;
  kernel.trial_at = kernel.calls + call_trials::distance(kernel.calls);
  return turn;
}

// A call of that turn took so long since `began`.
void end_turn(const ModuleKernel& kernel, TrialTurn turn, std::uint64_t began) {
  const std::optional<TrialTimes> lost =
      call_trials::add(call_trials::kModuleTrials, std::hash<std::string>{}(kernel.digest), turn,
                       trial_clock() - began);
  if (!lost) {
    return;
  }
  const ModuleRegistry& registry = ModuleRegistry::instance();
  for (const std::shared_ptr<ModuleRecord>& record : registry.records()) {
    if (record->drop(kernel)) {
      call_handler(registry.handlers().lost, py::handle(record->module), py::str(kernel.digest),
                   py::int_(lost->native_ns), py::int_(lost->kernel_ns));
    }
  }
}

// Whether the forward reads an object of the call by another way too, from the module or a global
// variable: there it would meet what it has put into the object.
bool is_reached_twice(const ModuleRecord& record, const ModuleCallForm& form) noexcept {
  for (PyObject* object : form.objects) {
    PyObject* const held = Fields(object).place();
    if (record.values->watches(held) || record.guard->values().watches(held)) {
      return true;
    }
  }
  return false;
}

}  // namespace

PyObject* answer_aside(ModuleRecord& record, ModuleAside reason, const ModuleCall& call) {
  ++record.aside[static_cast<std::size_t>(reason)];
  return call.forward_watched();
}

void take_counts(const ModuleKernel& kernel, c10::Device device, ModuleCallForm& form) {
  form.count_tensors.resize(form.counts.size());
  const std::size_t tensors = form.tensors.size();
  for (const ModuleKernel::Input& input : kernel.inputs) {
    if (!input.from_module && input.index >= tensors) {
      const std::size_t index = input.index - tensors;
      form.count_tensors[index] =
          at::empty({form.counts[index] + kCountOffset, 0}, at::TensorOptions().device(device));
    }
  }
}

PyObject* answer_by_kernel(ModuleRecord& record, ModuleKernel& kernel,
                           const ModuleShapeClass::Layout* layout, const ModuleCall& call,
                           const ModuleCallForm& form) {
  if (kernel.differs_on_replicas && computes_redundantly()) [[unlikely]] {
    ++record.native;
    return call.forward_watched();
  }
  if (kernel.takes_objects && is_reached_twice(record, form)) [[unlikely]] {
    return answer_aside(record, ModuleAside::kArgument, call);
  }
  for (const ModuleKernel::IndexRange& range : kernel.ranges) {
    const at::Tensor& tensor = input_of(kernel.inputs[range.input], *record.guard, form);
    if (!in_range(tensor, range.low, range.high, range.also)) [[unlikely]] {
      return answer_aside(record, ModuleAside::kIndexRange, call);
    }
  }
  if (!kernel.writes.empty() && !may_write(kernel, *record.guard, form)) [[unlikely]] {
    return answer_aside(record, ModuleAside::kTensorKind, call);
  }
  const TrialTurn turn = turn_of(record, kernel, call);
  if (is_natives(turn)) [[unlikely]] {
    const std::uint64_t began = trial_clock();
    PyObject* const answer = call.forward_watched();
    ++record.native;
    if (answer != nullptr && turn == TrialTurn::kNative) {
      end_turn(kernel, turn, began);
    }
    return answer;
  }
  bool failed = false;
  const bool training = kernel.training != nullptr;
  PyObject* result = nullptr;
  {
    std::optional<ProfileEvent> event;
    record.begin_event(event, kernel, form, ModuleRegistry::instance().handlers().name);
    const ModuleShapeClass::Strides& strides =
        layout == nullptr ? kernel.output_strides : layout->strides;
    result = training ? run_training_kernel(record, kernel, layout, form, call, &failed)
                      : run_kernel(kernel, strides, *record.guard, form, &failed);
  }
  if (result != nullptr) [[likely]] {
    // A forward that is asked too would change buffers or the call's objects once more, call
    // operators, or draw other numbers.
    if (verification_chosen() && !training && !kernel.takes_objects && kernel.writes.empty() &&
        kernel.noise.empty() && !kernel.model->calls_operators()) [[unlikely]] {
      return verified(record, kernel, call, result);
    }
    if (turn == TrialTurn::kKernel) [[unlikely]] {
      end_turn(kernel, turn, call.began);
    }
    ++record.hits;
    record.training_hits += training ? 1 : 0;
    return result;
  }
  const bool unbuilt = PyErr_Occurred() != nullptr;
  if (failed || unbuilt) {
    record.drop(kernel);
    if (!kernel.writes.empty()) {
      if (!unbuilt) {
        raise_undefined(kernel);
      }
      return nullptr;
    }
  }
  PyErr_Clear();  // of rebuilding the outputs; the forward decides what the user sees
  ++record.native;
  return call.forward_watched();
}

}  // namespace eagercache
