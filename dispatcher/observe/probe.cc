#include "dispatcher/observe/probe.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "dispatcher/base/locks.h"
#include "dispatcher/kernels/kernel_forms.h"
#include "dispatcher/memory/large_blocks.h"

namespace eagercache {
namespace {

thread_local Probe* thread_probe = nullptr;

// Probes that other threads than their own let go.
struct Orphans {
  Mutex mutex;
  std::vector<Probe*> probes EAGERCACHE_GUARDED_BY(mutex);
};

Orphans& orphans() {
  static auto* const all = new Orphans();
  return *all;
}

// Keeps the first warning and shows none.
class FirstWarning final : public c10::WarningHandler {
 public:
  explicit FirstWarning(std::string& text) : text_(text) {}
  void process(const c10::Warning& warning) override {
    if (text_.empty()) {
      text_ = warning.msg();
    }
  }

 private:
  std::string& text_;
};

void add_strides(const c10::IValue& result, std::vector<std::vector<std::int64_t>>& strides) {
  if (result.isTensorList()) {
    for (const c10::IValue& element : result.toListRef()) {
      add_strides(element, strides);
    }
    return;
  }
  const at::Tensor& output = result.toTensor();
  strides.push_back(output.defined() ? output.strides().vec() : std::vector<std::int64_t>{});
}

}  // namespace

Probe::Owned Probe::make(OperatorHook& hook) {
  std::vector<Owned> own;  // destroyed here, without the lock
  {
    const Lock lock(orphans().mutex);
    std::erase_if(orphans().probes, [&own](Probe* probe) {
      const bool is_own = probe->thread_ == std::this_thread::get_id();
      if (is_own) {
        own.emplace_back(probe);
      }
      return is_own;
    });
  }
  return Owned(new Probe(hook));
}

void Probe::Deleter::operator()(Probe* probe) const {
  if (probe->thread_ == std::this_thread::get_id()) {
    delete probe;
    return;
  }
  const Lock lock(orphans().mutex);
  orphans().probes.push_back(probe);
}

Probe::Probe(OperatorHook& hook) : hook_(hook) {
  if (thread_probe != nullptr) {
    thread_probe->retire();
  }
  thread_probe = this;
  attach();
}

void Probe::retire() noexcept {
  detach();
  mode_ = Mode::kIdle;
  captured_ = false;
  stack_.clear();
  rehearsal_.reset();
}

Probe::~Probe() {
  detach();
  if (thread_probe == this) {
    thread_probe = nullptr;
  }
}

bool Probe::waits_for(const OperatorHook& hook) const noexcept {
  return mode_ != Mode::kIdle && &hook_ == &hook &&
         !(hooks_answer.load(std::memory_order_relaxed) && hook.active());
}

void Probe::arm_capture() {
  captured_ = false;
  mode_ = Mode::kCapture;
}

void Probe::arm_force() {
  if (!captured_ || !kernel_) {
    throw std::logic_error("force needs a captured call and a loaded kernel");
  }
  forced_ = false;
  error_.clear();
  mode_ = Mode::kForce;
}

std::string Probe::digest(std::string_view policy_tag) const {
  return hook_.entry_digest(words_, policy_tag).hex();
}

Status Probe::load(const std::string& path, const std::string& launch_plan) {
  Result<SharedLibrary> library = SharedLibrary::open(path);
  if (!library) {
    return library.status();
  }
  const c10::Device device(hook_.device_type(),
                           hook_.device_type() == c10::DeviceType::CPU ? -1 : 0);
  // Only the plan of a kernel with symbolic sizes names a function of theirs.
  const bool has_shapes = launch_plan.find(R"("shape":)") != std::string::npos;
  const bool has_scalars = launch_plan.find(R"("scalars":)") != std::string::npos;
  KernelForm form{launch_plan.empty() ? "container"
                  : has_shapes        ? "shapes"
                  : has_scalars       ? "scalars"
                                      : "bare",
                  launch_plan,
                  {}};
  if (captured_ && launch_plan.empty()) {
    form.output_strides = nlohmann::json(output_strides_).dump();
  }
  Result<std::unique_ptr<LoadedKernel>> kernel = make_kernel(library.value(), device, form);
  if (!kernel) {
    return kernel.status();
  }
  take_kernel(std::move(kernel).value());
  return Status::ok();
}

Status Probe::load_cubins(const std::vector<std::string>& objects, const std::string& launch_plan) {
  const bool has_shapes = launch_plan.find(R"("pattern":)") != std::string::npos;
  const bool has_scalars = launch_plan.find(R"("scalars":)") != std::string::npos;
  const std::string form = has_shapes ? "cuda_shapes" : has_scalars ? "cuda_scalars" : "cuda";
  if (!captured_) {
    return {StatusCode::kInvalidArgument, "a CUDA kernel is loaded for a captured call"};
  }
  Result<std::unique_ptr<LoadedKernel>> kernel =
      make_cuda_kernel(objects, hook_.device_of(words_), {form, launch_plan, {}});
  if (!kernel) {
    return kernel.status();
  }
  take_kernel(std::move(kernel).value());
  return Status::ok();
}

void Probe::take_kernel(std::unique_ptr<LoadedKernel> kernel) {
  // Never destroyed, like every loaded kernel: OpenMP threads may still be inside its library.
  kernel_.release();  // NOLINT(bugprone-unused-return-value)
  kernel_ = std::move(kernel);
  auto* const scalars = dynamic_cast<ScalarKernel*>(kernel_.get());
  scalar_kernel_ = scalars != nullptr && scalars->num_scalars() != 0 ? scalars : nullptr;
}

bool Probe::take_call(OperatorHook& /*hook*/, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Mode mode = std::exchange(mode_, Mode::kIdle);
  const std::size_t num_arguments = hook_.plan().readers.size();
  for (const std::size_t argument : undefined_) {
    if (argument < num_arguments) {
      (*stack)[stack->size() - num_arguments + argument] = at::Tensor();
    }
  }
  if (mode == Mode::kCapture) {
    capture(keys, stack);
    return true;
  }
  CallView view;
  const AsideReason reason = hook_.read_call(*stack, view);
  if (reason != AsideReason::kNone || !std::ranges::equal(view.key.words(), words_)) {
    error_ = "the call's key differs from the captured one";
    return false;
  }
  if (kernel_->num_inputs() != view.tensors.view().size() ||
      !hook_.takes_outputs(kernel_->num_outputs())) {
    error_ = "the kernel takes or returns another number of tensors";
    return false;
  }
  const LoadedKernel::Outcome outcome = run_kernel(view, stack);
  forced_ = outcome == LoadedKernel::Outcome::kAnswered;
  if (!forced_) {
    error_ = "the kernel reported an error";
    TORCH_CHECK(outcome == LoadedKernel::Outcome::kNotStarted || !kernel_->writes_inputs(),
                hook_.full_name(), ": a kernel that writes its arguments failed");
  }
  return forced_;
}

void Probe::capture(c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto num_arguments = static_cast<std::ptrdiff_t>(hook_.plan().readers.size());
  {
    CallView view;
    aside_ = hook_.read_call(*stack, view);
    words_.clear();
    if (aside_ == AsideReason::kNone) {
      words_.assign(view.key.words().begin(), view.key.words().end());
    }
  }
  stack_.assign(stack->end() - num_arguments, stack->end());
  rehearsal_.reset();
  {
    warning_.clear();
    FirstWarning handler(warning_);
    c10::WarningUtils::WarningHandlerGuard guard(&handler);
    hook_.call_native(keys, stack);
  }
  output_strides_.clear();
  for (auto result = stack->end() - static_cast<std::ptrdiff_t>(hook_.num_returns());
       result != stack->end(); ++result) {
    add_strides(*result, output_strides_);
  }
  captured_ = true;
}

LoadedKernel::Outcome Probe::run_kernel(const CallView& view, torch::jit::Stack* stack) {
  if (scalar_kernel_ == nullptr) {
    return hook_.call_kernel(*kernel_, view, stack);
  }
  std::array<Word, KeyBuffer::kCapacity> words;
  std::array<double, kMaxScalars> numbers;
  const std::size_t count = scalar_class(view.key.words(), words, numbers);
  ScalarKernel::WithScalars kernel(*scalar_kernel_, {numbers.data(), count});
  return hook_.call_kernel(kernel, view, stack);
}

bool Probe::hit(const GuardTable& table, torch::jit::Stack* stack) {
  CallView view;
  if (hook_.read_call(*stack, view) != AsideReason::kNone) {
    return false;
  }
  const std::span<const Word> words = view.key.words();
  const bool found = table.find(words, hash_words(words)).state == EntryState::kKernel;
  if (scalar_kernel_ == nullptr) {
    return found && run_kernel(view, stack) == LoadedKernel::Outcome::kAnswered;
  }
  std::array<Word, KeyBuffer::kCapacity> own;
  std::array<double, kMaxScalars> numbers;
  const std::size_t count = scalar_class(words, own, numbers);
  const std::span<const Word> key(own.data(), words.size());
  if (count == 0 || table.find(key, hash_words(key)).state != EntryState::kKernel) {
    return false;
  }
  ScalarKernel::WithScalars kernel(*scalar_kernel_, {numbers.data(), count});
  return hook_.call_kernel(kernel, view, stack) == LoadedKernel::Outcome::kAnswered;
}

double Probe::mean_ns(std::size_t calls, bool hit) {
  const c10::DispatchKeySet keys(hook_.dispatch_key());
  GuardTable table(4);
  const std::vector<Word> key = scalar_kernel_ == nullptr ? words_ : scalar_class_of(words_);
  table.set_kernel(key, hash_words(key), kernel_.get());
  torch::jit::Stack stack;
  std::chrono::duration<double, std::nano> elapsed{0};
  for (std::size_t done = 0; done < calls;) {
    rehearsal_->reset();
    const std::size_t end = std::min(calls, done + rehearsal_->period());
    const auto start = std::chrono::steady_clock::now();
    for (; done < end; ++done) {
      const torch::jit::Stack& arguments = rehearsal_->arguments(done);
      stack.assign(arguments.begin(), arguments.end());
      if (hit) {
        if (!this->hit(table, &stack)) {
          throw std::runtime_error("the kernel did not answer while it was timed");
        }
      } else {
        hook_.call_native(keys, &stack);
      }
      stack.clear();
    }
    elapsed += std::chrono::steady_clock::now() - start;
  }
  return elapsed.count() / static_cast<double>(calls);
}

std::vector<std::pair<double, double>> Probe::time(std::size_t pairs, std::size_t calls) {
  if (!captured_ || aside_ != AsideReason::kNone || !kernel_) {
    throw std::logic_error("time needs a captured call with a key and a loaded kernel");
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutKeptBlocks as_native;
  if (!rehearsal_) {
    rehearsal_ = std::make_unique<Rehearsal>(stack_, hook_.plan().written);
  }
  std::vector<std::pair<double, double>> result;
  result.reserve(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    // The order alternates, so that a drift of the clock favours neither side.
    if (i % 2 == 0) {
      const double native = mean_ns(calls, false);
      result.emplace_back(native, mean_ns(calls, true));
    } else {
      const double hit = mean_ns(calls, true);
      result.emplace_back(mean_ns(calls, false), hit);
    }
  }
  return result;
}

}  // namespace eagercache
