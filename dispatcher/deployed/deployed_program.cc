#include "dispatcher/deployed/deployed_program.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>

#include "dispatcher/base/index_range.h"
#include "dispatcher/device/cuda_driver.h"
#include "dispatcher/hook/inside_guard.h"
#include "dispatcher/hook/thread_state.h"
#include "dispatcher/kernels/container_kernel.h"

namespace eagercache {
namespace {

Status wrong_call(const std::string& what) { return {StatusCode::kInvalidArgument, what}; }

// The strides of a tensor of these sizes that is dense in the order of the example's dimensions.
std::vector<std::int64_t> dense_like(const LaunchPlan::Output& example, at::IntArrayRef sizes) {
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::size_t d) { return example.strides[d]; });
  std::vector<std::int64_t> strides(sizes.size(), 1);
  std::int64_t step = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = step;
    step *= sizes[*d];
  }
  return strides;
}

bool same_layout(const at::Tensor& tensor, const std::vector<std::int64_t>& strides) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != strides[static_cast<std::size_t>(d)]) {
      return false;
    }
  }
  return true;
}

std::size_t default_runners() { return std::max(1U, std::thread::hardware_concurrency()); }

template <typename Ready>
bool wait_for(std::condition_variable& condition, Lock& lock, double seconds, Ready ready) {
  // Longer than any process lives, and not so long that the sum overflows.
  const std::chrono::duration<double> limit(std::min(std::max(seconds, 0.0), 1e8));
  return lock.wait_for(condition, limit, ready);
}

}  // namespace

// A call under way, from its runner on.
class DeployedProgram::Turn {
 public:
  Turn(DeployedProgram& program, Place place) : program_(program), counted_(place != Place::kNone) {
    Lock lock(program.turns_mutex_);
    const auto free = [&]() EAGERCACHE_REQUIRES(program.turns_mutex_) {
      return program.taken_ < program.runners_;
    };
    if (place == Place::kTry && !free()) {
      return;
    }
    if (place == Place::kWait) {
      lock.wait(program.freed_, free);
    }
    program.taken_ += counted_ ? 1 : 0;
    ++program.running_;
    begun_ = true;
  }
  ~Turn() {
    if (!begun_) {
      return;
    }
    // Under the lock: who waits for the end may let go of the program as soon as it is free.
    const Lock lock(program_.turns_mutex_);
    if (counted_) {
      --program_.taken_;
      program_.freed_.notify_one();
    }
    if (--program_.running_ == 0) {
      program_.ended_.notify_all();
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  bool begun() const noexcept { return begun_; }

 private:
  DeployedProgram& program_;
  const bool counted_;
  bool begun_ = false;
};

DeployedProgram::DeployedProgram(ProgramSpec spec, std::vector<ConstantForm> constants,
                                 c10::Device device, std::size_t runners)
    : spec_(std::move(spec)),
      device_(device),
      runners_(runners == 0 ? default_runners() : runners),
      weights_(
          std::move(constants), spec_, device,
          spec_.folded.empty() ? WeightSets::Folder()
                               : [this](std::vector<at::Tensor>* values) { return fold(values); }) {
  for (const ProgramSpec::Tensor& input : spec_.inputs) {
    open_.emplace_back(input.form.sizes.size(), false);
  }
  for (const auto& [input, dimension] : spec_.open) {
    open_[input][dimension] = true;
  }
  for (const ProgramSpec::Tensor& output : spec_.outputs) {
    output_strides_.push_back(output.form.strides);
  }
}

Status DeployedProgram::load(const std::vector<std::filesystem::path>& libraries) {
  if (libraries.size() != (spec_.folded.empty() ? 1 : 2)) {
    return {StatusCode::kCorrupt, "the program has another number of libraries than functions"};
  }
  const auto fits = [](const SharedContainer& container, std::size_t inputs, std::size_t outputs) {
    return container.model().num_inputs() == inputs && container.model().num_outputs() == outputs;
  };
  Result<SharedContainer*> main = SharedContainer::open(libraries[0], device_);
  if (!main) {
    return main.status();
  }
  main_ = main.value();
  bool sound = fits(*main_, spec_.main.size(), spec_.outputs.size());
  if (!spec_.folded.empty()) {
    Result<SharedContainer*> folding = SharedContainer::open(libraries[1], device_);
    if (!folding) {
      return folding.status();
    }
    fold_ = folding.value();
    sound = sound && fits(*fold_, spec_.fold_inputs.size(), spec_.folded.size());
  }
  if (!spec_.open.empty()) {
    shape_ = reinterpret_cast<ProgramShapeFunction>(main_->model().symbol(kShapeFunction));
    sound = sound && shape_ != nullptr;
  }
  return sound ? Status::ok()
               : Status(StatusCode::kCorrupt, "the program's libraries do not fit its description");
}

Result<std::unique_ptr<DeployedProgram>> DeployedProgram::make(Parts parts) {
  Result<ProgramSpec> spec = parse_program(parts.program, parts.constants);
  if (!spec) {
    return spec.status();
  }
  if (parts.values.size() != parts.constants.size()) {
    return wrong_call("not one value for each constant");
  }
  std::unique_ptr<DeployedProgram> program(new DeployedProgram(
      std::move(spec).value(), std::move(parts.constants), parts.device, parts.runners));
  if (Status status = program->load(parts.libraries); !status) {
    return status;
  }
  if (Status status = program->weights_.start(std::move(parts.values)); !status) {
    return status;
  }
  return program;
}

Status DeployedProgram::check_inputs(std::span<const at::Tensor> inputs) const {
  if (inputs.size() != spec_.inputs.size()) {
    return wrong_call("the module takes " + std::to_string(spec_.inputs.size()) + " tensors, not " +
                      std::to_string(inputs.size()));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ProgramSpec::Tensor& wanted = spec_.inputs[i];
    const at::Tensor& input = inputs[i];
    const std::string name = "the input " + wanted.name;
    if (!input.defined() || input.layout() != c10::Layout::Strided || input.device() != device_ ||
        input.key_set().has(c10::DispatchKey::Python)) {
      return wrong_call(name + " is no plain tensor of " +
                        (device_.is_cpu() ? "the CPU" : device_.str()));
    }
    if (input.scalar_type() != wanted.form.dtype) {
      return wrong_call(name + " is of " + c10::toString(input.scalar_type()) + ", not of " +
                        c10::toString(wanted.form.dtype));
    }
    bool fits = static_cast<std::size_t>(input.dim()) == wanted.form.sizes.size();
    for (std::size_t d = 0; fits && d < wanted.form.sizes.size(); ++d) {
      const std::int64_t size = input.size(static_cast<std::int64_t>(d));
      fits = open_[i][d] ? size > 0 : size == wanted.form.sizes[d];
    }
    if (!fits) {
      return wrong_call(name + " has the sizes " + sizes_text(input.sizes()) +
                        "; the module takes " + sizes_text(wanted.form.sizes) +
                        (spec_.open.empty() ? "" : " with some of them open"));
    }
  }
  return Status::ok();
}

Status DeployedProgram::check_sizes(std::span<const at::Tensor> inputs,
                                    std::vector<std::vector<std::int64_t>>* strides) const {
  if (Status status = check_inputs(inputs); !status) {
    return status;
  }
  if (shape_ == nullptr) {
    *strides = output_strides_;
    return Status::ok();
  }
  std::vector<std::int64_t> sizes;
  for (const auto& [input, dimension] : spec_.open) {
    sizes.push_back(inputs[input].size(static_cast<std::int64_t>(dimension)));
  }
  std::size_t count = 0;
  for (const std::vector<std::int64_t>& row : output_strides_) count += row.size();
  std::vector<std::int64_t> all(count);
  if (shape_(sizes.data(), all.data()) != 0) {
    return wrong_call("the module does not hold for the open sizes " + sizes_text(sizes));
  }
  auto from = all.begin();
  for (const std::vector<std::int64_t>& row : output_strides_) {
    const auto size = static_cast<std::ptrdiff_t>(row.size());
    strides->emplace_back(from, from + size);
    from += size;
  }
  return Status::ok();
}

Result<std::vector<at::Tensor>> DeployedProgram::prepare(
    std::span<const at::Tensor> inputs, std::vector<std::vector<std::int64_t>>* strides) const {
  if (Status status = check_sizes(inputs, strides); !status) {
    return status;
  }
  std::vector<at::Tensor> prepared;
  prepared.reserve(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const LaunchPlan::Output& form = spec_.inputs[i].form;
    const bool open = std::ranges::find(open_[i], true) != open_[i].end();
    const std::vector<std::int64_t> wanted =
        open ? dense_like(form, inputs[i].sizes()) : form.strides;
    if (same_layout(inputs[i], wanted) && is_aligned_on(device_, inputs[i]) &&
        !inputs[i].is_conj() && !inputs[i].is_neg()) {
      prepared.push_back(inputs[i]);
    } else {
      const InsideGuard inside;
      const at::NoGradGuard no_grad;
      prepared.push_back(at::empty_strided(inputs[i].sizes(), wanted, inputs[i].options()));
      prepared.back().copy_(inputs[i]);
    }
  }
  for (const ProgramSpec::IndexRange& range : spec_.ranges) {
    if (!range.of.constant && !in_range(prepared[range.of.index], range.low, range.high)) {
      return wrong_call("the input " + spec_.inputs[range.of.index].name +
                        " has an index outside of [" + std::to_string(range.low) + ", " +
                        std::to_string(range.high) + ")");
    }
  }
  return prepared;
}

Status DeployedProgram::check_thread() const {
  if (thread_state_reason() != AsideReason::kNone) {
    return {StatusCode::kUnsupported,
            "a deployed module cannot be called under a mode, a function transform or another "
            "floating-point mode"};
  }
  if (is_capturing(device_)) {
    return {StatusCode::kUnsupported,
            "a deployed module cannot be called while the current stream is captured into a graph, "
            "which would go on with weights that an update has let go of"};
  }
  return Status::ok();
}

Result<DeployedProgram::Answer> DeployedProgram::run(std::span<const at::Tensor> inputs,
                                                     Place place) {
  if (Status status = check_thread(); !status) {
    return status;
  }
  std::vector<std::vector<std::int64_t>> strides;
  const Result<std::vector<at::Tensor>> prepared = prepare(inputs, &strides);
  if (!prepared) {
    return prepared.status();
  }
  const Turn turn(*this, place);
  if (!turn.begun()) {
    return Status(StatusCode::kBusy,
                  "all " + std::to_string(runners_) + " runners of the module are in use");
  }
  const WeightSetPtr weights = weights_.active();
  weights->read_on(device_);
  std::vector<at::Tensor> all;
  all.reserve(spec_.main.size());
  for (const ProgramSpec::Source& source : spec_.main) {
    all.push_back(source.constant ? weights->values[source.index] : prepared.value()[source.index]);
  }
  Answer answer{std::vector<at::Tensor>(spec_.outputs.size()), weights->version};
  const LoadedKernel::Outcome outcome = main_->run(all, answer.outputs);
  if (outcome != LoadedKernel::Outcome::kAnswered) {
    return Status(StatusCode::kUnsupported,
                  outcome == LoadedKernel::Outcome::kNotStarted
                      ? "the device had no memory for the call, or failed before it"
                      : "the module's compiled code reported an error");
  }
  for (std::size_t i = 0; i < answer.outputs.size(); ++i) {
    adopt_strides(answer.outputs[i], strides[i]);
  }
  return answer;
}

Status DeployedProgram::fold(std::vector<at::Tensor>* values) const {
  const c10::InferenceMode no_inference(false);
  std::vector<at::Tensor> inputs;
  for (const std::size_t row : spec_.fold_inputs) {
    inputs.push_back((*values)[row]);
  }
  std::vector<at::Tensor> outputs(spec_.folded.size());
  if (fold_->run(inputs, outputs) != LoadedKernel::Outcome::kAnswered) {
    return {StatusCode::kUnsupported, "folding the constants failed"};
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const LaunchPlan::Output& form = weights_.forms()[spec_.folded[i]].form;
    if (outputs[i].sizes() != at::IntArrayRef(form.sizes) ||
        outputs[i].scalar_type() != form.dtype) {
      return {StatusCode::kUnsupported, "folding the constants gave other tensors"};
    }
    adopt_strides(outputs[i], form.strides);
    (*values)[spec_.folded[i]] = std::move(outputs[i]);
  }
  return Status::ok();
}

bool DeployedProgram::is_ready() const {
  const Lock lock(turns_mutex_);
  return taken_ < runners_;
}

bool DeployedProgram::wait_until_ready(double seconds) const {
  Lock lock(turns_mutex_);
  const bool ready = wait_for(
      freed_, lock, seconds, [&]() EAGERCACHE_REQUIRES(turns_mutex_) { return taken_ < runners_; });
  if (ready) {
    freed_.notify_one();  // it was only asked for: one that waits to run may have been passed over
  }
  return ready;
}

bool DeployedProgram::wait_until_idle(double seconds) const {
  Lock lock(turns_mutex_);
  return wait_for(ended_, lock, seconds,
                  [&]() EAGERCACHE_REQUIRES(turns_mutex_) { return running_ == 0; });
}

}  // namespace eagercache
