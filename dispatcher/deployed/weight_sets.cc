#include "dispatcher/deployed/weight_sets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <utility>

#include "dispatcher/base/index_range.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/inside_guard.h"

namespace eagercache {
namespace {

Status wrong_constant(const std::string& what) { return {StatusCode::kInvalidArgument, what}; }

std::string place_text(c10::Device device) { return device.is_cpu() ? "the CPU" : device.str(); }

// Why a tensor cannot be a constant of the form on `device`; empty when it can.
std::string constant_problem(const ConstantForm& form, const at::Tensor& value,
                             c10::Device device) {
  if (!value.defined() || value.layout() != c10::Layout::Strided ||
      !(value.device().is_cpu() || value.device().type() == device.type()) ||
      value.key_set().has(c10::DispatchKey::Python)) {
    return std::string("is no plain tensor of the CPU") + (device.is_cpu() ? "" : " or a GPU");
  }
  if (value.scalar_type() != form.form.dtype) {
    return std::string("is of ") + c10::toString(value.scalar_type()) + ", not of " +
           c10::toString(form.form.dtype);
  }
  if (value.sizes() != at::IntArrayRef(form.form.sizes)) {
    return "has the sizes " + sizes_text(value.sizes()) + ", not " + sizes_text(form.form.sizes);
  }
  return {};
}

at::Tensor constant_copy(const at::Tensor& value, const std::vector<std::int64_t>& strides,
                         c10::Device device) {
  at::Tensor copy = at::empty_strided(value.sizes(), strides, value.options().device(device));
  copy.copy_(value);
  return copy;
}

// Of one dtype and the same sizes.
bool equal_values(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.to(b.device()).equal(b);
}

}  // namespace

WeightSets::WeightSets(std::vector<ConstantForm> forms, const ProgramSpec& spec, c10::Device device,
                       Folder folder)
    : forms_(std::move(forms)),
      ranges_(spec.ranges),
      device_(device),
      stream_(update_stream(device)),
      folder_(std::move(folder)),
      is_fold_input_(forms_.size(), false) {
  for (const std::size_t row : spec.fold_inputs) {
    is_fold_input_[row] = true;
  }
  for (std::size_t row = 0; row < forms_.size(); ++row) {
    for (const std::string& name : forms_[row].names) {
      rows_.emplace(name, row);
    }
  }
}

Status WeightSets::check_writable() const {
  return is_capturing(device_)
             ? Status(StatusCode::kUnsupported,
                      "a module's weights cannot be set while the current stream is captured into "
                      "a graph")
             : Status::ok();
}

Status WeightSets::start(std::vector<at::Tensor> values) {
  const Lock writer(writers_mutex_);
  if (Status status = check_writable(); !status) {
    return status;
  }
  const InsideGuard inside;
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  BesideRequests beside(stream_);
  bool complete = true;
  for (std::size_t row = 0; row < forms_.size(); ++row) {
    if (forms_[row].folded() && !values[row].defined()) {
      complete = false;
      continue;
    }
    const bool keep = !values[row].defined() ||
                      (values[row].device() == device_ && is_aligned_on(device_, values[row]));
    Result<at::Tensor> value = accepted(forms_[row], forms_[row].names.front(), values[row], keep);
    if (!value) {
      return value.status();
    }
    values[row] = std::move(value).value();
  }
  if (Status status = check_ranges(values); !status) {
    return status;
  }
  if (!complete) {
    if (Status status = folder_(&values); !status) {
      return status;
    }
  }
  beside.finish();
  auto set = std::make_shared<const WeightSet>(next_version_++, std::move(values));
  const Lock lock(pointers_mutex_);
  active_ = {std::move(set), true};
  return Status::ok();
}

WeightSetPtr WeightSets::active() const {
  const Lock lock(pointers_mutex_);
  return active_.set;
}

std::uint64_t WeightSets::inactive_version() const {
  const Lock lock(pointers_mutex_);
  return inactive_.set == nullptr ? 0 : inactive_.set->version;
}

Result<WeightSets::Slot> WeightSets::slot(Which which) const {
  const Lock lock(pointers_mutex_);
  const Slot& found = which == Which::kActive ? active_ : inactive_;
  if (found.set == nullptr) {
    return Status(StatusCode::kNotFound, "there are no inactive constants; update them first");
  }
  return found;
}

Result<at::Tensor> WeightSets::accepted(const ConstantForm& form, const std::string& name,
                                        const at::Tensor& value, bool keep) const {
  if (const std::string problem = constant_problem(form, value, device_); !problem.empty()) {
    return wrong_constant("the constant " + name + " " + problem);
  }
  if (!keep) {
    return constant_copy(value, form.form.strides, device_);
  }
  if (value.device() != device_ || !is_aligned_on(device_, value)) {
    return wrong_constant("the constant " + name + " can only be kept where it is on " +
                          place_text(device_) + ", at a multiple of " +
                          std::to_string(kGpuAlignment) + " bytes");
  }
  if (value.strides() != at::IntArrayRef(form.form.strides) || value.is_conj() || value.is_neg()) {
    return wrong_constant("the constant " + name + " can only be kept with the strides " +
                          sizes_text(form.form.strides));
  }
  return value.detach();
}

Status WeightSets::replace(std::vector<at::Tensor>* values,
                           const std::map<std::string, at::Tensor>& given, const Update& how,
                           bool* folds) const {
  std::map<std::size_t, const at::Tensor*> met;
  for (const auto& [name, value] : given) {
    const auto row = rows_.find(name);
    if (row == rows_.end()) {
      return wrong_constant("there is no constant " + name);
    }
    const auto [before, inserted] = met.emplace(row->second, &value);
    if (!inserted && before->second->unsafeGetTensorImpl() != value.unsafeGetTensorImpl() &&
        !equal_values(*before->second, value)) {
      return wrong_constant("the constant " + name +
                            " has other names, under which other values came");
    }
    if (!inserted) {
      continue;
    }
    if (forms_[row->second].folded()) {
      return wrong_constant("the constant " + name + " is folded: it is computed from others");
    }
    Result<at::Tensor> tensor = accepted(forms_[row->second], name, value, how.keep);
    if (!tensor) {
      return tensor.status();
    }
    (*values)[row->second] = std::move(tensor).value();
    *folds = *folds || is_fold_input_[row->second];
  }
  for (std::size_t row = 0; how.whole && row < forms_.size(); ++row) {
    if (!forms_[row].folded() && !met.contains(row)) {
      return wrong_constant("the constant " + forms_[row].names.front() + " was not given");
    }
  }
  return check_ranges(*values);
}

Status WeightSets::check_ranges(const std::vector<at::Tensor>& values) const {
  for (const ProgramSpec::IndexRange& range : ranges_) {
    // Those of a GPU are looked at here: what traps there takes the process's context with it.
    if (range.of.constant && !in_range(values[range.of.index].cpu(), range.low, range.high)) {
      return wrong_constant("the constant " + forms_[range.of.index].names.front() +
                            " has an index outside of [" + std::to_string(range.low) + ", " +
                            std::to_string(range.high) + ")");
    }
  }
  return Status::ok();
}

Result<WeightSets::Slot> WeightSets::folded(Slot slot) {
  if (slot.folded || !folder_) {
    slot.folded = true;
    return slot;
  }
  std::vector<at::Tensor> values = slot.set->values;
  if (Status status = folder_(&values); !status) {
    return status;
  }
  return Slot{std::make_shared<const WeightSet>(slot.set->version, std::move(values)), true};
}

Status WeightSets::update(const std::map<std::string, at::Tensor>& values, const Update& how) {
  const Lock writer(writers_mutex_);
  if (Status status = check_writable(); !status) {
    return status;
  }
  const InsideGuard inside;  // native copies, whatever is hooked
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  BesideRequests beside(stream_);
  Result<Slot> base = slot(how.which);
  if (base.code() == StatusCode::kNotFound) {
    base = slot(Which::kActive);
  }
  if (!base) {
    return base.status();
  }
  std::vector<at::Tensor> changed = base->set->values;
  bool folds = false;
  if (Status status = replace(&changed, values, how, &folds); !status) {
    return status;
  }
  Slot made{std::make_shared<const WeightSet>(next_version_, std::move(changed)),
            base->folded && !folds};
  if (how.which == Which::kActive) {
    Result<Slot> ready = folded(std::move(made));
    if (!ready) {
      return ready.status();
    }
    made = std::move(ready).value();
  }
  beside.finish();
  ++next_version_;
  const Lock lock(pointers_mutex_);
  std::swap(how.which == Which::kActive ? active_ : inactive_, made);
  return Status::ok();
}

Status WeightSets::swap() {
  const Lock writer(writers_mutex_);
  if (Status status = check_writable(); !status) {
    return status;
  }
  Result<Slot> next = slot(Which::kInactive);
  if (next && !next->folded) {
    BesideRequests beside(stream_);
    next = folded(std::move(next).value());
    beside.finish();
  }
  if (!next) {
    return next.status();
  }
  const Lock lock(pointers_mutex_);
  inactive_ = std::exchange(active_, std::move(next).value());
  return Status::ok();
}

Status WeightSets::fold(Which which) {
  const Lock writer(writers_mutex_);
  if (Status status = check_writable(); !status) {
    return status;
  }
  const InsideGuard inside;
  BesideRequests beside(stream_);
  Result<Slot> made = slot(which);
  if (made) {
    made->folded = false;
    if (Status status = check_ranges(made->set->values); !status) {
      return status;
    }
    made = folded(std::move(made).value());
  }
  if (!made) {
    return made.status();
  }
  beside.finish();
  const Lock lock(pointers_mutex_);
  std::swap(which == Which::kActive ? active_ : inactive_, made.value());
  return Status::ok();
}

void WeightSets::drop_inactive() {
  const Lock writer(writers_mutex_);
  Slot dropped;
  const Lock lock(pointers_mutex_);
  std::swap(inactive_, dropped);
}

Result<std::map<std::string, at::Tensor>> WeightSets::values(Which which, bool folded) const {
  const Result<Slot> from = slot(which);
  if (!from) {
    return from.status();
  }
  const InsideGuard inside;
  const at::NoGradGuard no_grad;
  from->set->read_on(device_);
  std::map<std::string, at::Tensor> all;
  for (std::size_t row = 0; row < forms_.size(); ++row) {
    if (forms_[row].folded() && (!folded || !from->folded)) {
      continue;
    }
    const at::Tensor copy =
        constant_copy(from->set->values[row], forms_[row].form.strides, device_);
    for (const std::string& name : forms_[row].names) {
      all.emplace(name, copy);
    }
  }
  return all;
}

}  // namespace eagercache
