#include "python_hooks/nn_modules/call.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <structmember.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <bit>
#include <cstddef>
#include <iterator>
#include <optional>
#include <utility>

#include "dispatcher/base/index_range.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/device/device_stream.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/hook/switches.h"
#include "dispatcher/hook/thread_state.h"
#include "dispatcher/kernels/container_kernel.h"
#include "dispatcher/kernels/numerics_rule.h"
#include "dispatcher/observe/verification.h"
#include "guards/builder/key_builder.h"
#include "python_hooks/nn_modules/objects.h"
#include "python_hooks/nn_modules/raise_later.h"
#include "python_hooks/nn_modules/training.h"
#include "python_hooks/nn_modules/writes.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// Above a module's forward a mode's snapshot counts too.
constexpr c10::DispatchKeySet kForeignToModules =
    kForeignState | c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot);

// Watched modules whose own forward runs on this thread right now.
thread_local int watched_depth = 0;

// Blocks on this thread in which forwards answer; see modules_step_aside.
thread_local int aside_depth = 0;

class WatchedScope {
 public:
  WatchedScope() noexcept { ++watched_depth; }
  ~WatchedScope() { --watched_depth; }
  WatchedScope(const WatchedScope&) = delete;
  WatchedScope& operator=(const WatchedScope&) = delete;
};

// Calls a handler; what it raises is reported as unraisable and dropped. But for what a signal's
// handler raised meanwhile (KeyboardInterrupt), which is the program's.
template <typename... Args>
py::object call_handler(const py::object& handler, const Args&... args) noexcept {
  if (!handler) {
    return py::none();
  }
  try {
    return handler(args...);
  } catch (py::error_already_set& error) {
    put_off_or_discard(error);
  } catch (...) {
  }
  return py::none();
}

// Whether a level of forward-mode AD is open, in any thread: tangents may hide in any tensor that a
// forward reads, in parameters, buffers, attributes, globals and closures, and kernels know of
// none.
bool forward_gradients_are_made() {
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

ModuleAside thread_reason() {
  if (thread_state_reason(kForeignToModules) != AsideReason::kNone ||
      at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing() ||
      at::in_parallel_region() || forward_gradients_are_made()) [[unlikely]] {
    return ModuleAside::kDispatchState;
  }
  const at::Context& context = at::globalContext();
  if (!context.userEnabledFlashSDP() || !context.userEnabledMemEfficientSDP() ||
      !context.userEnabledMathSDP() || !context.userEnabledCuDNNSDP()) [[unlikely]] {
    return ModuleAside::kGlobalState;
  }
  return ModuleAside::kNone;
}

// Process and thread state that changes what a forward on `device` computes. The last word is the
// GPU's index and one, 0 for the CPU: everything before it is the same on all GPUs.
void put_state(ModuleCallForm& form, c10::Device device) {
  GlobalState state = read_global_state();
  Word priorities = 0;
  if (device.is_cuda()) {
    state.num_threads = 1;  // of the host, where nothing is computed
    for (const at::SDPBackend backend : at::globalContext().sDPPriorityOrder()) {
      priorities = (priorities << 8) | (static_cast<Word>(backend) & 0xFF);
    }
  }
  KeyBuffer key;
  key.put_state(state);
  form.words.append(key.words().begin(), key.words().end());
  Word autocast = 0;
  for (const c10::DeviceType type : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    const bool enabled = at::autocast::is_autocast_enabled(type);
    const auto dtype = static_cast<Word>(at::autocast::get_autocast_dtype(type));
    autocast = (autocast << 16) | (enabled ? 0x100 | dtype : 0);
  }
  form.words.push_back(autocast);
  form.words.push_back(priorities);
  form.words.push_back(device.is_cuda() ? static_cast<Word>(device.index()) + 1 : 0);
}

// The one device of a call; kTensorKind when there are several. What a forward makes on "cuda" is
// made on the thread's current GPU, so that this has to be the same.
ModuleAside find_device(const ModuleGuard& guard, const ModuleCallForm& form, c10::Device* device) {
  const std::optional<c10::Device> own = guard.device();
  *device = own.value_or(form.device.value_or(c10::Device(c10::DeviceType::CPU)));
  if (form.device.value_or(*device) != *device) {
    return ModuleAside::kTensorKind;
  }
  if (device->is_cuda() &&
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice() != *device) {
    return ModuleAside::kGlobalState;
  }
  return ModuleAside::kNone;
}

// One call: the arguments as vectorcall gives them, `args[0]` being the module.
struct Call {
  PyObject* original;
  PyObject* const* args;
  std::size_t nargsf;
  PyObject* names;

  std::size_t count() const noexcept {
    return static_cast<std::size_t>(PyVectorcall_NARGS(nargsf));
  }
  PyObject* forward() const noexcept { return PyObject_Vectorcall(original, args, nargsf, names); }
  PyObject* forward_watched() const noexcept {
    const WatchedScope scope;
    return forward();
  }
  py::tuple positional() const {
    py::tuple values(count() - 1);
    for (std::size_t i = 1; i < count(); ++i) {
      values[i - 1] = py::reinterpret_borrow<py::object>(args[i]);
    }
    return values;
  }
  py::dict keywords() const {
    py::dict values;
    const Py_ssize_t size = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; i < size; ++i) {
      values[py::handle(PyTuple_GET_ITEM(names, i))] =
          py::reinterpret_borrow<py::object>(args[count() + static_cast<std::size_t>(i)]);
    }
    return values;
  }
};

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
                       const ModuleCallForm& form, Outputs& outputs) {
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
  py::tuple objects(form.objects.size());
  for (std::size_t i = 0; i < objects.size(); ++i) {
    objects[i] = py::reinterpret_borrow<py::object>(form.objects[i]);
  }
  return PyObject_CallFunctionObjArgs(kernel.unflatten.ptr(), list.ptr(), objects.ptr(), nullptr);
}

LoadedKernel::Outcome run_container(ModuleKernel& kernel, const ModuleGuard& guard,
                                    const ModuleCallForm& form, Outputs& outputs) {
  auto handles = take_inputs(kernel, guard, form);
  const py::gil_scoped_release no_gil;
  const InsideGuard inside;
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
                                    const ModuleCallForm& form, Outputs& outputs) {
  void* stream = nullptr;
  if (!current_stream(kernel.device, &stream)) {
    return LoadedKernel::Outcome::kNotStarted;
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
    outcome = run_container(kernel, guard, form, outputs);
  }
  if (plan.trial != nullptr) {
    plan.trial->end(plan.timed, stream);
  }
  return outcome;
}

// The kernel's answer, or nullptr without an exception when the forward has to answer.
PyObject* run_kernel(ModuleKernel& kernel, const ModuleShapeClass::Strides& strides,
                     const ModuleGuard& guard, const ModuleCallForm& form, bool* failed) {
  Outputs outputs(kernel.model->num_outputs());
  const LoadedKernel::Outcome outcome = kernel.device.is_cuda() && replays_are_made()
                                            ? run_or_replay(kernel, guard, form, outputs)
                                            : run_container(kernel, guard, form, outputs);
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
  move_versions(kernel, form);
  return wrap_outputs(kernel, strides, form, outputs);
}

// The same for a call that needs gradients.
PyObject* run_training_kernel(const ModuleKernel& kernel, const ModuleGuard& guard,
                              const ModuleCallForm& form, const Call& call, bool* failed) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(kernel.inputs.size());
  for (const ModuleKernel::Input& input : kernel.inputs) {
    inputs.push_back(input_of(input, guard, form));
  }
  if (!may_be_recorded(kernel, inputs)) {
    return nullptr;
  }
  py::tuple whole = kept_call(*kernel.training, call.args[0], call.positional(), call.keywords());
  c10::SmallVector<at::Tensor, 4> answers;
  const LoadedKernel::Outcome outcome =
      answer_with_gradients(kernel, std::move(inputs), std::move(whole), answers);
  *failed = outcome == LoadedKernel::Outcome::kFailed;
  return outcome == LoadedKernel::Outcome::kAnswered
             ? wrap_outputs(kernel, kernel.output_strides, form, answers)
             : nullptr;
}

PyObject* aside(ModuleRecord& record, ModuleAside reason, const Call& call) {
  ++record.aside[static_cast<std::size_t>(reason)];
  return call.forward_watched();
}

// A call with an argument that no kernel can take, a cache object for one. A module that gets
// nothing else is given up after some calls, so that its parts are tried.
PyObject* aside_for_argument(const ModuleRegistry& registry, ModuleRecord& record,
                             const Call& call) {
  constexpr std::uint64_t kCalls = 3;
  PyObject* result = aside(record, ModuleAside::kArgument, call);
  const std::uint64_t calls = record.aside[static_cast<std::size_t>(ModuleAside::kArgument)];
  if (result != nullptr && calls == kCalls && record.hits == 0 && record.pending == 0) {
    call_handler(registry.handlers().unfit, py::handle(call.args[0]));
  }
  return result;
}

// The arguments of a call. Forwards change objects, so that those are copied before one runs.
struct Arguments {
  py::tuple positional;
  py::dict keywords;

  static Arguments of(const Call& call, bool copies) {
    Arguments made{call.positional(), call.keywords()};
    if (copies) {
      const py::tuple copied = copy_of_objects(py::make_tuple(made.positional, made.keywords));
      made.positional = copied[0];
      made.keywords = copied[1];
    }
    return made;
  }
};

// Counts one call of a form without a verdict; the Python side hears of its 1st, 2nd, 4th ... call.
void note_pending(ModuleRegistry& registry, ModuleRecord& record, const Call& call,
                  const ModuleCallForm& form, std::optional<Arguments> given) {
  if (!record.valid) {
    return;
  }
  const std::span<const Word> words(form.words.data(), form.words.size());
  ModuleVariant* variant = record.find(words);
  if (variant == nullptr) {
    variant = record.add(words);
  }
  if (variant == nullptr) {
    ++record.aside[static_cast<std::size_t>(ModuleAside::kTooManyForms)];
    return;
  }
  ++record.pending;
  const std::uint32_t calls = ++variant->calls;
  if (variant->state == ModuleVariant::State::kPending && std::has_single_bit(calls)) {
    const py::bytes key(reinterpret_cast<const char*>(words.data()), words.size_bytes());
    if (!given.has_value()) {
      given = Arguments::of(call, false);
    }
    call_handler(registry.handlers().missed, py::handle(call.args[0]), given->positional,
                 given->keywords, key, py::int_(calls), py::bool_(form.requires_grad));
  }
}

PyObject* answer_pending(ModuleRegistry& registry, ModuleRecord& record, const Call& call,
                         const ModuleCallForm& form) {
  std::optional<Arguments> given;
  if (!form.objects.empty()) {
    const ModuleVariant* known = record.find({form.words.data(), form.words.size()});
    if (known == nullptr ||
        (known->state == ModuleVariant::State::kPending && std::has_single_bit(known->calls + 1))) {
      given = Arguments::of(call, true);
    }
  }
  PyObject* result = call.forward_watched();
  if (result != nullptr) {
    try {
      note_pending(registry, record, call, form, std::move(given));
    } catch (...) {
      PyErr_Clear();  // out of memory; the next call is counted
    }
  }
  return result;
}

// Asks the forward too. A new reference to what is right; nullptr where the forward raised.
PyObject* verified(ModuleRecord& record, const ModuleKernel& kernel, const Call& call,
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

// Whether the forward reads an object of the call by another way too, from the module or a global
// variable: there it would meet what it has put into the object.
bool is_reached_twice(const ModuleRecord& record, const ModuleCallForm& form) noexcept {
  for (PyObject* object : form.objects) {
    PyObject* const held = attributes_of(object);
    if (record.values->watches(held) || record.guard->values().watches(held)) {
      return true;
    }
  }
  return false;
}

// `strides` are those of the outputs: the kernel's own, or what its class says for the call.
// Makes the tensors that stand for the counts which the kernel takes.
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
                           const ModuleShapeClass::Strides& strides, const Call& call,
                           const ModuleCallForm& form) {
  if (kernel.differs_on_replicas && computes_redundantly()) [[unlikely]] {
    ++record.native;
    return call.forward_watched();
  }
  if (kernel.takes_objects && is_reached_twice(record, form)) [[unlikely]] {
    return aside(record, ModuleAside::kArgument, call);
  }
  for (const ModuleKernel::IndexRange& range : kernel.ranges) {
    const at::Tensor& tensor = input_of(kernel.inputs[range.input], *record.guard, form);
    if (!in_range(tensor, range.low, range.high, range.also)) [[unlikely]] {
      return aside(record, ModuleAside::kIndexRange, call);
    }
  }
  if (!kernel.writes.empty() && !may_write(kernel, *record.guard, form)) [[unlikely]] {
    return aside(record, ModuleAside::kTensorKind, call);
  }
  bool failed = false;
  const bool training = kernel.training != nullptr;
  PyObject* result = nullptr;
  {
    std::optional<ProfileEvent> event;
    record.begin_event(event, kernel, form, ModuleRegistry::instance().handlers().name);
    result = training ? run_training_kernel(kernel, *record.guard, form, call, &failed)
                      : run_kernel(kernel, strides, *record.guard, form, &failed);
  }
  if (result != nullptr) [[likely]] {
    // A forward that is asked too would change the call's objects once more.
    if (verification_chosen() && !training && !kernel.takes_objects) [[unlikely]] {
      return verified(record, kernel, call, result);
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

constexpr unsigned kPasses = 15;

// Whether the record's guard still holds; when not, the record says so from now on.
ModuleGuard::Verdict check(ModuleRecord& record, bool* requires_grad) noexcept {
  if (!record.valid) {
    return ModuleGuard::Verdict::kChanged;
  }
  ModuleGuard::Verdict verdict = record.guard->check(requires_grad);
  if (verdict == ModuleGuard::Verdict::kSame && !record.values->same()) {
    record.values_changed = true;
    verdict = ModuleGuard::Verdict::kChanged;
  }
  if (verdict == ModuleGuard::Verdict::kChanged) {
    record.invalidate();
  }
  return verdict;
}

PyObject* answer(ModuleRegistry& registry, ModuleRecord& record, const Call& call) {
  if (const ModuleAside reason = thread_reason(); reason != ModuleAside::kNone) {
    return aside(record, reason, call);
  }
  bool requires_grad = false;
  ModuleGuard::Verdict verdict = check(record, &requires_grad);
  if (verdict == ModuleGuard::Verdict::kChanged) {
    registry.ask_to_look(record);
    // Whoever waits for kernels has been waited for.
    verdict = check(record, &requires_grad);
  }
  if (record.state == ModuleRecord::State::kRefused) {
    return call.forward();
  }
  if (verdict == ModuleGuard::Verdict::kChanged) {
    return aside(record, ModuleAside::kChanged, call);
  }
  if (global_hooks_are_set()) {
    return aside(record, ModuleAside::kHooks, call);
  }
  if (verdict == ModuleGuard::Verdict::kHooked) {
    // The modules below that have none of them are tried, as a wrapper's inner ones.
    ++record.aside[static_cast<std::size_t>(ModuleAside::kHooks)];
    return call.forward();
  }
  ModuleCallForm form;
  c10::Device device(c10::DeviceType::CPU);
  ModuleAside reason =
      read_arguments({call.args + 1, call.count() - 1}, call.names, call.args + call.count(), form);
  if (reason == ModuleAside::kNone) {
    reason = find_device(*record.guard, form, &device);
  }
  if (reason == ModuleAside::kArgument) {
    return aside_for_argument(registry, record, call);
  }
  if (reason != ModuleAside::kNone) {
    return aside(record, reason, call);
  }
  form.requires_grad = (requires_grad || form.requires_grad) && at::GradMode::is_enabled();
  if (!form.objects.empty()) {
    if (form.requires_grad) {
      record.left[1] = true;  // the modules below may have kernels for such calls
    }
  }
  if (form.requires_grad) {
    if (!registry.training()) {
      return aside(record, ModuleAside::kGradients, call);
    }
    if (!record.left[1] && saved_tensors_are_watched()) {
      return aside(record, ModuleAside::kSavedHooks, call);
    }
    put_gradients(*record.guard, form);
  }
  const bool to_parts = record.left[form.requires_grad ? 1 : 0];
  if (to_parts && (form.requires_grad || record.forms_to_try == 0)) {
    record.passes = form.requires_grad ? kPasses : 0;
    ++record.native;
    return call.forward();
  }
  put_state(form, device);
  ModuleVariant* variant = record.find({form.words.data(), form.words.size()});
  if (variant != nullptr && variant->state == ModuleVariant::State::kKernel) [[likely]] {
    return answer_by_kernel(record, *variant->kernel, variant->kernel->output_strides, call, form);
  }
  if (variant != nullptr && variant->state == ModuleVariant::State::kNative) {
    ++record.native;
    return to_parts ? call.forward() : call.forward_watched();
  }
  ModuleShapeClass::Strides strides;
  bool chosen = false;
  const ModuleShapeClass* shape_class =
      record.find_class({form.words.data(), form.words.size()}, strides, &chosen);
  if (shape_class != nullptr && chosen) {
    if (!form.counts.empty()) {
      const InsideGuard inside;
      take_counts(*shape_class->kernel(), device, form);
    }
    return answer_by_kernel(record, *shape_class->kernel(), strides, call, form);
  }
  if (is_capturing(device)) {
    // What is captured is the forward, and nothing is asked for.
    ++record.pending;
    return call.forward_watched();
  }
  return answer_pending(registry, record, call, form);
}

// Whether this call is its forward's without a look at it, as every one that the thread may make
// now; the guard tells of some. It may have been left for values that it read, and that are others
// now. The first calls after that and one of many are looked at, as long as other forms are tried.
bool is_left(const ModuleRegistry& registry, ModuleRecord& record) noexcept {
  constexpr unsigned kFirst = 4;
  constexpr unsigned kOneOf = 32;
  if (!record.left[0] || !(record.left[1] || !registry.training() || !at::GradMode::is_enabled()) ||
      !record.values->same()) {
    return false;
  }
  if (record.forms_to_try == 0) {
    return true;
  }
  const unsigned calls = record.calls_since_left++;
  return calls >= kFirst && calls % kOneOf != 0;
}

// Whether a call that may need gradients is taken for one that is left, as the last one was: to
// look at the module and the arguments costs microseconds, at each level of a model that has no
// kernel. Every sixteenth is looked at. The forward, which answers, is never wrong.
bool passes_by(const ModuleRegistry& registry, ModuleRecord& record) noexcept {
  if (record.passes == 0 || !record.left[1] || !registry.training() ||
      !at::GradMode::is_enabled()) {
    return false;
  }
  --record.passes;
  ++record.native;
  return true;
}

// A module without a record: nullptr when its own forward answers and nothing is remembered.
std::shared_ptr<ModuleRecord> meet(ModuleRegistry& registry, PyObject* module) {
  const py::object verdict =
      call_handler(registry.handlers().select, py::handle(module), py::bool_(watched_depth != 0));
  if (!PyUnicode_CheckExact(verdict.ptr())) {
    return nullptr;
  }
  const bool watch = PyUnicode_CompareWithASCIIString(verdict.ptr(), "watch") == 0;
  if (!watch && PyUnicode_CompareWithASCIIString(verdict.ptr(), "refuse") != 0) {
    return nullptr;
  }
  try {
    std::shared_ptr<ModuleRecord> record = registry.adopt(module);
    record->state = watch ? ModuleRecord::State::kNew : ModuleRecord::State::kRefused;
    return record;
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("eagercache");
    return nullptr;
  }
}

PyObject* call_module(PyObject* original, PyObject* const* args, std::size_t nargsf,
                      PyObject* names) {
  const Call call{original, args, nargsf, names};
  ModuleRegistry& registry = ModuleRegistry::instance();
  if (!registry.active() || !hooks_answer.load(std::memory_order_relaxed) || call.count() == 0 ||
      aside_depth != 0) {
    return call.forward();
  }
  try {
    // Held: enabling anew in another thread may drop it from the registry.
    std::shared_ptr<ModuleRecord> record = registry.find(args[0]);
    if (record == nullptr) {
      record = meet(registry, args[0]);
    }
    if (record == nullptr || record->state == ModuleRecord::State::kRefused ||
        is_left(registry, *record) || passes_by(registry, *record)) {
      return call.forward();
    }
    return answer(registry, *record, call);
  } catch (const std::exception&) {
    // Out of memory, before anything of the user's ran: what comes after swallows its own.
    PyErr_Clear();
    return call.forward();
  }
}

// ---- a callable around another one, which is found as a method
// -----------------------------------

struct Wrapper {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* original;
};

PyObject* wrapper_vectorcall(PyObject* self, PyObject* const* args, std::size_t nargsf,
                             PyObject* names) {
  return call_module(reinterpret_cast<Wrapper*>(self)->original, args, nargsf, names);
}

PyTypeObject* wrapper_type() {
  static PyTypeObject* const type = [] {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(Wrapper, vectorcall), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                  {Py_tp_members, members},
                                  {0, nullptr}};
    static PyType_Spec spec = {"eagercache._C.ModuleCall", sizeof(Wrapper), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  return type;
}

}  // namespace

void modules_step_aside(bool begins) noexcept { aside_depth += begins ? 1 : -1; }

ModuleRegistry& ModuleRegistry::instance() {
  static auto* registry = new ModuleRegistry();
  return *registry;
}

std::shared_ptr<ModuleRecord> ModuleRegistry::find(PyObject* module) noexcept {
  const auto found = records_.find(module);
  return found == records_.end() ? nullptr : found->second;
}

std::shared_ptr<ModuleRecord> ModuleRegistry::adopt(PyObject* module) {
  std::shared_ptr<ModuleRecord>& record = records_[module];
  if (record == nullptr) {
    py::cpp_function gone([this, module](py::handle) { forget(module); });
    PyObject* reference = PyWeakref_NewRef(module, gone.ptr());
    if (reference == nullptr) {
      records_.erase(module);
      throw py::error_already_set();
    }
    weak_references_[module] = reference;
    record = std::make_shared<ModuleRecord>(module);
  }
  return record;
}

void ModuleRegistry::unwatch(const ModuleRecord& record) {
  if (record.guard == nullptr) {
    return;
  }
  for (PyObject* module : record.guard->modules()) {
    const auto [first, last] = watchers_.equal_range(module);
    for (auto at = first; at != last;) {
      at = at->second == &record ? watchers_.erase(at) : std::next(at);
    }
  }
}

void ModuleRegistry::forget(PyObject* module) {
  const auto found = records_.find(module);
  if (found == records_.end()) {
    return;
  }
  const std::shared_ptr<ModuleRecord> record = std::move(found->second);
  records_.erase(found);
  unwatch(*record);
  const auto reference = weak_references_.find(module);
  if (reference != weak_references_.end()) {
    const py::object dropped = py::reinterpret_steal<py::object>(reference->second);
    weak_references_.erase(reference);
  }
}

void ModuleRegistry::forget_all() {
  while (!records_.empty()) {
    forget(records_.begin()->first);
  }
}

std::vector<std::shared_ptr<ModuleRecord>> ModuleRegistry::records() const {
  std::vector<std::shared_ptr<ModuleRecord>> all;
  for (const auto& [module, record] : records_) {
    all.push_back(record);
  }
  return all;
}

bool ModuleRegistry::set_guard(ModuleRecord& record, std::unique_ptr<ModuleGuard> guard,
                               const std::string& identity, std::uint64_t version,
                               bool forget_forms) {
  record.asked = false;
  if (record.version != version) {
    return false;
  }
  unwatch(record);
  for (PyObject* module : guard->modules()) {
    watchers_.emplace(module, &record);
  }
  // The old one may hold the last reference to a submodule, whose end runs code.
  const std::unique_ptr<ModuleGuard> old = std::exchange(record.guard, std::move(guard));
  if (forget_forms) {
    record.forget_forms();
  }
  record.use_identity(identity);
  record.state = ModuleRecord::State::kWatched;
  record.valid = true;
  return true;
}

void ModuleRegistry::note_changed(PyObject* module) noexcept {
  if (watchers_.empty()) {
    return;
  }
  const auto [first, last] = watchers_.equal_range(module);
  for (auto at = first; at != last; ++at) {
    at->second->invalidate();
  }
}

void ModuleRegistry::ask_to_look(ModuleRecord& record) {
  if (!record.asked) {
    record.asked = true;
    call_handler(handlers_.look, py::handle(record.module));
  }
}

// Never freed: torch.nn.Module keeps it.
py::object make_module_call(py::handle original) {
  PyTypeObject* type = wrapper_type();
  PyObject* object = type == nullptr ? nullptr : type->tp_alloc(type, 0);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  auto* wrapper = reinterpret_cast<Wrapper*>(object);
  wrapper->vectorcall = wrapper_vectorcall;
  wrapper->original = original.inc_ref().ptr();
  Py_INCREF(object);
  return py::reinterpret_steal<py::object>(object);
}

}  // namespace eagercache
