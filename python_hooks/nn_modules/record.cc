#include "python_hooks/nn_modules/record.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

#include "python_hooks/nn_modules/raise_later.h"
#include "python_hooks/nn_modules/writes.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// Identities remembered for one module: train and eval mode, and a few more.
constexpr std::size_t kMaxIdentities = 16;

std::string origin_of(const ModuleKernel::Input& input, const ModuleGuard& guard,
                      const ModuleCallForm& form) {
  if (input.from_module) {
    return guard.tensor_name(input.index);
  }
  const bool counts = input.index >= form.tensors.size();
  return counts ? "a number of the call" : "input " + std::to_string(input.index);
}

// What the kernel's inputs are, by Inductor's names: {"arg0_1": "input 0, float32[8, 16]",
// "arg1_1": "parameter layers.0.scale, float32[16]"}. Inputs are counted as in the call's "Input
// Dims". Empty where the kernel's library tells no names.
ProfileEvent::Arguments shown_arguments(const ModuleKernel& kernel, const ModuleGuard& guard,
                                        const ModuleCallForm& form) {
  ProfileEvent::Arguments shown;
  const std::vector<std::string> names = kernel.model->input_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    // What comes after the inputs is drawn for a call that needs gradients.
    shown[names[i]] = i < kernel.inputs.size()
                          ? shown_tensor(origin_of(kernel.inputs[i], guard, form),
                                         input_of(kernel.inputs[i], guard, form))
                          : std::string("random numbers");
  }
  return shown;
}

}  // namespace

ModuleVariant* ModuleRecord::find(std::span<const Word> words) noexcept {
  if (current_ == nullptr) {
    return nullptr;
  }
  const auto found =
      std::find_if(current_->begin(), current_->end(), [&](const ModuleVariant& variant) {
        return std::equal(words.begin(), words.end(), variant.words.begin(), variant.words.end());
      });
  if (found == current_->end()) {
    return nullptr;
  }
  // The latest first: a program that calls with one form pays for one comparison.
  current_->splice(current_->begin(), *current_, found);
  return &current_->front();
}

ModuleVariant* ModuleRecord::add(std::span<const Word> words) {
  if (current_ == nullptr || current_->size() >= kMaxVariants) {
    return nullptr;
  }
  current_->push_front({{words.begin(), words.end()}, ModuleVariant::State::kPending, 0, nullptr});
  return &current_->front();
}

void ModuleRecord::keep_guard(const ModuleGuard& next) {
  if (guard == nullptr || !guard->reads_all_attributes() || guard->modules() != next.modules()) {
    return;
  }
  kept_guard = std::move(guard);
  kept_identity = guard_identity;
}

bool ModuleRecord::takes_back(bool* requires_grad) noexcept {
  if (kept_guard == nullptr || !guard->reads_all_attributes() ||
      kept_guard->check(requires_grad) != ModuleGuard::Verdict::kSame ||
      !ways_hold(kept_identity)) {
    return false;
  }
  try {
    use_identity(kept_identity);
  } catch (const std::bad_alloc&) {
    return false;
  }
  std::swap(guard, kept_guard);
  std::swap(guard_identity, kept_identity);
  return true;
}

void ModuleRecord::use_identity(const std::string& identity) {
  const auto known = by_identity_.find(identity);
  if (known == by_identity_.end() && by_identity_.size() >= kMaxIdentities) {
    by_identity_.clear();
    classes_by_identity_.clear();
  }
  current_ = &by_identity_[identity];
  classes_ = &classes_by_identity_[identity];
}

void ModuleRecord::forget_forms() {
  current_ = nullptr;
  classes_ = nullptr;
  by_identity_.clear();
  classes_by_identity_.clear();
  values = std::make_unique<ModuleValues>();
  ways.clear();
  values_changed = false;
  left = {};
  forms_to_try = kFormsToTry;
  calls_since_left = 0;
}

void ModuleRecord::require_tensors_of(const ModuleKernel& kernel) const {
  for (const ModuleKernel::Input& input : kernel.inputs) {
    if (guard != nullptr && input.from_module && input.index >= guard->num_tensors()) {
      throw std::invalid_argument("the kernel asks for a tensor that the module does not have");
    }
  }
}

void ModuleRecord::install_class(const std::string& identity,
                                 std::unique_ptr<ModuleShapeClass> shape_class) {
  const auto known = classes_by_identity_.find(identity);
  if (known == classes_by_identity_.end()) {
    return;
  }
  for (const auto& other : known->second) {
    if (other->kernel() == shape_class->kernel()) {
      return;
    }
  }
  known->second.push_back(std::move(shape_class));
}

ModuleShapeClass* ModuleRecord::find_class(std::span<const Word> words,
                                           ModuleShapeClass::Layout& layout, bool* chosen) const {
  if (classes_ == nullptr) {
    return nullptr;
  }
  for (const auto& shape_class : *classes_) {
    const ModuleShapeClass::Answer answer = shape_class->admits(words, layout);
    if (answer != ModuleShapeClass::Answer::kForeign) {
      *chosen = answer == ModuleShapeClass::Answer::kKernel;
      return shape_class.get();
    }
  }
  return nullptr;
}

std::vector<const ModuleKernel*> ModuleRecord::kernels() const {
  std::vector<const ModuleKernel*> all;
  if (current_ != nullptr) {
    for (const ModuleVariant& variant : *current_) {
      if (variant.kernel != nullptr) {
        all.push_back(variant.kernel);
      }
    }
  }
  if (classes_ != nullptr) {
    for (const auto& known : *classes_) {
      all.push_back(known->kernel());
    }
  }
  return all;
}

bool ModuleRecord::drop(const ModuleKernel& kernel) noexcept {
  bool dropped = false;
  // Each module object loads an entry's kernel for itself.
  const auto is_dropped = [&kernel](const ModuleKernel* other) {
    return other == &kernel ||
           (other != nullptr && !kernel.digest.empty() && other->digest == kernel.digest);
  };
  for (auto& [identity, classes] : classes_by_identity_) {
    dropped |=
        std::erase_if(classes, [&](const auto& known) { return is_dropped(known->kernel()); }) != 0;
  }
  for (auto& [identity, variants] : by_identity_) {
    for (ModuleVariant& variant : variants) {
      if (is_dropped(variant.kernel)) {
        variant.kernel = nullptr;
        variant.state = ModuleVariant::State::kNative;
        dropped = true;
      }
    }
  }
  return dropped;
}

void ModuleRecord::install(const std::string& identity, std::span<const Word> words,
                           ModuleKernel* kernel) {
  const auto known = by_identity_.find(identity);
  if (known == by_identity_.end()) {
    return;
  }
  for (ModuleVariant& variant : known->second) {
    if (std::equal(words.begin(), words.end(), variant.words.begin(), variant.words.end())) {
      variant.state =
          kernel == nullptr ? ModuleVariant::State::kNative : ModuleVariant::State::kKernel;
      variant.kernel = kernel;
      return;
    }
  }
}

// "layers.0.mlp", or the module's class where no model that it is a part of was called.
const std::string& ModuleRecord::shown_name(const py::object& name) {
  if (shown_.empty() && name && !name.is_none()) {
    try {
      shown_ = py::cast<std::string>(name(py::handle(module)));
    } catch (py::error_already_set& error) {
      put_off_or_discard(error);
    } catch (const py::cast_error&) {
    }
  }
  if (shown_.empty()) {
    shown_ = Py_TYPE(module)->tp_name;
  }
  return shown_;
}

void ModuleRecord::begin_event(std::optional<ProfileEvent>& event, const ModuleKernel& kernel,
                               const ModuleCallForm& form, const py::object& name) noexcept {
  std::optional<at::StepCallbacks> listeners = profile_listeners();
  if (!listeners) [[likely]] {
    return;
  }
  try {
    // The node of autograd that this call makes has the next number.
    const std::int64_t sequence =
        kernel.training == nullptr ? -1 : static_cast<std::int64_t>(at::sequence_number::peek());
    const ProfileEvent::Arguments arguments = listeners->needs_inputs_
                                                  ? shown_arguments(kernel, *guard, form)
                                                  : ProfileEvent::Arguments();
    event.emplace(std::move(*listeners), module_event_name(shown_name(name), kernel.digest),
                  std::span<const at::Tensor* const>(form.tensors.data(), form.tensors.size()),
                  sequence, arguments);
  } catch (...) {
    // Out of memory: the profile lacks one event.
  }
}

}  // namespace eagercache
