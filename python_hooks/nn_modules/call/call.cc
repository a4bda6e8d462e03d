#include "python_hooks/nn_modules/call/call.h"

#include <ATen/core/grad_mode.h>
#include <structmember.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <bit>
#include <cstddef>
#include <optional>
#include <utility>

#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/call_trials.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/hook/switches.h"
#include "python_hooks/nn_modules/call/call_state.h"
#include "python_hooks/nn_modules/call/kernel_answer.h"
#include "python_hooks/nn_modules/call/module_call.h"
#include "python_hooks/nn_modules/objects.h"
#include "python_hooks/nn_modules/registry.h"
#include "python_hooks/nn_modules/training/training.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// A call with an argument that no kernel can take, a cache object for one. A module that gets
// nothing else is given up after some calls, so that its parts are tried.
PyObject* aside_for_argument(const ModuleRegistry& registry, ModuleRecord& record,
                             const ModuleCall& call) {
  constexpr std::uint64_t kCalls = 3;
  PyObject* result = answer_aside(record, ModuleAside::kArgument, call);
  const std::uint64_t calls = record.aside[static_cast<std::size_t>(ModuleAside::kArgument)];
  if (result != nullptr && calls == kCalls && record.hits == 0 && record.pending == 0) {
    call_handler(registry.handlers().unfit, py::handle(call.args[0]));
  }
  return result;
}

// Whether a forward that was just run has made another one of its module, which may be what it
// stays: the next call is looked at. One that does so again is asked for, and refused.
bool is_unsettled(ModuleRecord& record) noexcept {
  constexpr unsigned kTimes = 2;
  bool requires_grad = false;
  if (record.guard->check(&requires_grad) == ModuleGuard::Verdict::kSame) {
    record.unsettled = 0;
    return false;
  }
  return record.hits != 0 || ++record.unsettled < kTimes;
}

// Counts one call of a form without a verdict; the Python side hears of its 1st, 2nd, 4th ... call.
void note_pending(ModuleRegistry& registry, ModuleRecord& record, const ModuleCall& call,
                  const ModuleCallForm& form, std::optional<ModuleArguments> given) {
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
    if (is_unsettled(record)) {
      return;
    }
    const py::bytes key(reinterpret_cast<const char*>(words.data()), words.size_bytes());
    if (!given.has_value()) {
      given = ModuleArguments::of(call, false);
    }
    call_handler(registry.handlers().missed, py::handle(call.args[0]), given->positional,
                 given->keywords, key, py::int_(calls), py::bool_(form.requires_grad));
  }
}

PyObject* answer_pending(ModuleRegistry& registry, ModuleRecord& record, const ModuleCall& call,
                         const ModuleCallForm& form) {
  std::optional<ModuleArguments> given;
  if (!form.objects.empty()) {
    const ModuleVariant* known = record.find({form.words.data(), form.words.size()});
    if (known == nullptr ||
        (known->state == ModuleVariant::State::kPending && std::has_single_bit(known->calls + 1))) {
      given = ModuleArguments::of(call, true);
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

constexpr unsigned kPasses = 15;

// Whether the record's guard still holds; when not, the record says so from now on.
ModuleGuard::Verdict check(ModuleRecord& record, bool* requires_grad) noexcept {
  if (!record.valid) {
    return ModuleGuard::Verdict::kChanged;
  }
  ModuleGuard::Verdict verdict = record.guard->check(requires_grad);
  if (verdict == ModuleGuard::Verdict::kChanged && record.takes_back(requires_grad)) {
    verdict = ModuleGuard::Verdict::kSame;
  }
  if (verdict == ModuleGuard::Verdict::kSame && !record.values->same()) {
    record.note_values_changed();
    return ModuleGuard::Verdict::kChanged;
  }
  if (verdict == ModuleGuard::Verdict::kChanged) {
    record.invalidate();
  }
  return verdict;
}

// Answers a call whose arguments were read: by what there is for its form.
PyObject* answer_form(ModuleRegistry& registry, ModuleRecord& record, const ModuleCall& call,
                      c10::Device device, ModuleCallForm& form) {
  const bool to_parts = record.left[form.requires_grad ? 1 : 0];
  if (to_parts && (form.requires_grad || record.forms_to_try == 0)) {
    record.passes = form.requires_grad ? kPasses : 0;
    ++record.native;
    return call.forward();
  }
  put_state(form, device);
  ModuleVariant* variant = record.find({form.words.data(), form.words.size()});
  if (variant != nullptr && variant->state == ModuleVariant::State::kKernel) [[likely]] {
    return answer_by_kernel(record, *variant->kernel, nullptr, call, form);
  }
  if (variant != nullptr && variant->state == ModuleVariant::State::kNative) {
    ++record.native;
    return to_parts ? call.forward() : call.forward_watched();
  }
  ModuleShapeClass::Layout layout;
  bool chosen = false;
  const ModuleShapeClass* shape_class =
      record.find_class({form.words.data(), form.words.size()}, layout, &chosen);
  if (shape_class != nullptr && chosen) {
    if (!form.counts.empty()) {
      const InsideGuard inside;
      take_counts(*shape_class->kernel(), device, form);
    }
    return answer_by_kernel(record, *shape_class->kernel(), &layout, call, form);
  }
  if (is_capturing(device)) {
    // What is captured is the forward, and nothing is asked for.
    ++record.pending;
    return call.forward_watched();
  }
  return answer_pending(registry, record, call, form);
}

PyObject* answer(ModuleRegistry& registry, ModuleRecord& record, const ModuleCall& call) {
  if (const ModuleAside reason = thread_reason(); reason != ModuleAside::kNone) {
    return answer_aside(record, reason, call);
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
    return answer_aside(record, ModuleAside::kChanged, call);
  }
  if (global_hooks_are_set()) {
    return answer_aside(record, ModuleAside::kHooks, call);
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
  if (reason == ModuleAside::kArgumentTwice) {
    // Another call may have a kernel; this one's parts are tried.
    ++record.aside[static_cast<std::size_t>(reason)];
    return call.forward();
  }
  if (reason != ModuleAside::kNone) {
    return answer_aside(record, reason, call);
  }
  form.requires_grad = (requires_grad || form.requires_grad) && at::GradMode::is_enabled();
  if (form.requires_grad) {
    if (!registry.training()) {
      return answer_aside(record, ModuleAside::kGradients, call);
    }
    if (!record.left[1] && saved_tensors_are_watched()) {
      return answer_aside(record, ModuleAside::kSavedHooks, call);
    }
    if (!record.left[1] && torch::autograd::AnomalyMode::is_enabled()) {
      return answer_aside(record, ModuleAside::kAnomalyMode, call);
    }
    put_gradients(*record.guard, form);
  }
  return answer_form(registry, record, call, device, form);
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

// A module without a record: nullptr when its own forward answers and nothing is remembered. Below
// one whose kernel may come nothing is looked at, at hundreds of calls of a large model's forward.
std::shared_ptr<ModuleRecord> meet(ModuleRegistry& registry, PyObject* module) {
  if (watched_depth != 0) {
    return nullptr;
  }
  const py::object verdict = call_handler(registry.handlers().select, py::handle(module));
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
  ModuleCall call{original, args, nargsf, names};
  ModuleRegistry& registry = ModuleRegistry::instance();
  if (!registry.active() || !hooks_answer.load(std::memory_order_relaxed) || call.count() == 0 ||
      modules_are_aside()) {
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
    if (record->timed_next) [[unlikely]] {
      record->timed_next = false;
      call.began = trial_clock();
    }
    return answer(registry, *record, call);
  } catch (const std::exception&) {
    // Out of memory, before anything of the user's ran: what comes after swallows its own.
    PyErr_Clear();
    return call.forward();
  }
}

// ---- a callable around another one, which is found as a method ----------------------------------

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
