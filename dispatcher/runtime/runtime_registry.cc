// Runtime: hooks, policy, store and handler. The path of a miss is in runtime_miss.cc.

#include <c10/util/Exception.h>
#include <pthread.h>

#include <cmath>
#include <cstdlib>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/hook/boxed_functor.h"
#include "dispatcher/hook/unboxed_hooks.h"
#include "dispatcher/runtime/runtime.h"
#include "guards/builder/torch_compat.h"
#include "guards/table/epoch.h"

namespace eagercache {
namespace {

// Swallows warnings: overriding an existing kernel is what we are here for, and torch says so once.
class SilentWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

std::string hook_key(const std::string& name, const std::string& overload,
                     const std::string& dispatch_key) {
  return name + "." + overload + "@" + dispatch_key;
}

std::string display_name(const std::string& name, const std::string& overload) {
  return overload.empty() ? name : name + "." + overload;
}

// The registry says where a kernel was registered: "CUDA: registered at /x/y.py:380 :: (none) [
// boxed ]" is a Python function in native's place; compiled kernels name a C++ source.
bool is_python_kernel(const c10::OperatorHandle& op, c10::DispatchKey key,
                      const std::string& dispatch_key) {
  if (compat::lookup_kernel(op, key).isValidUnboxed()) {
    return false;  // Python functions are registered boxed; the text below takes long
  }
  const std::string state = "\n" + op.dumpState();
  const std::string prefix = "\n" + dispatch_key + ": registered at ";
  const std::size_t line = state.find(prefix);
  if (line == std::string::npos) {
    return false;
  }
  const std::string text = state.substr(line + 1, state.find('\n', line + 1) - line - 1);
  for (const char* suffix : {".cpp:", ".cc:", ".cxx:", ".cu:", ".h:", ".hpp:"}) {
    if (text.find(suffix) != std::string::npos) {
      return false;
    }
  }
  return true;
}

}  // namespace

Runtime& Runtime::instance() {
  static auto* runtime = new Runtime();
  return *runtime;
}

Runtime::Runtime() {
  // A forked child must not touch our locks, threads or files, and OpenMP's threads are gone: it
  // answers natively for the rest of its life.
  pthread_atfork(nullptr, nullptr, [] { Runtime::instance().before_fork_child(); });
}

void Runtime::before_fork_child() {
  forked_.store(true, std::memory_order_relaxed);
  hooks_answer.store(false, std::memory_order_relaxed);
}

Result<OperatorHook*> Runtime::register_operator(const std::string& name,
                                                 const std::string& overload,
                                                 const std::string& dispatch_key) {
  const std::string shown = display_name(name, overload);
  c10::DispatchKey key;
  try {
    key = c10::parseDispatchKey(dispatch_key);
  } catch (const c10::Error&) {
    return Status(StatusCode::kInvalidArgument, "unknown dispatch key '" + dispatch_key + "'");
  }
  if (key != c10::DispatchKey::CPU && key != c10::DispatchKey::CUDA) {
    return Status(StatusCode::kInvalidArgument,
                  "dispatch key '" + dispatch_key + "' is not one of CPU, CUDA");
  }
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) {
    return Status(StatusCode::kInvalidArgument, "there is no operator " + shown);
  }
  const Lock lock(registry_mutex_);
  auto& slot = hooks_[hook_key(name, overload, dispatch_key)];
  if (slot) {
    return slot.get();
  }
  Eligibility eligibility = check_eligibility(*op, key);
  if (eligibility.eligible && name.starts_with("aten::") &&
      is_python_kernel(*op, key, dispatch_key)) {
    eligibility.eligible = false;
    eligibility.reason = "a Python function stands in its native kernel's place";
  }
  if (eligibility.eligible && hooks_.size() > kMaxHooks) {
    eligibility.eligible = false;
    eligibility.reason = "too many operators are hooked";
  }
  if (!eligibility.eligible) {
    hooks_.erase(hook_key(name, overload, dispatch_key));
    return Status(StatusCode::kUnsupported,
                  shown + " cannot be accelerated: " + eligibility.reason);
  }
  try {
    auto hook =
        std::make_unique<OperatorHook>(*op, key, std::move(eligibility), hooks_.size() - 1, *this);
    const UnboxedMaker* unboxed = find_unboxed(*hook);
    put_implementation(
        op->operator_name(), key, unboxed != nullptr ? unboxed->make(*hook) : hook->boxed_kernel(),
        unboxed != nullptr ? std::make_optional(unboxed->signature()) : std::nullopt);
    hook->note_registered();
    slot = std::move(hook);
    return slot.get();
  } catch (const std::exception& error) {
    hooks_.erase(hook_key(name, overload, dispatch_key));
    return Status(StatusCode::kUnsupported, shown + " could not be registered: " + error.what());
  }
}

void Runtime::put_implementation(const c10::OperatorName& name, c10::DispatchKey key,
                                 c10::KernelFunction kernel,
                                 std::optional<c10::impl::CppSignature> signature) {
  SilentWarnings silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  registrations_.push_back(c10::Dispatcher::singleton().registerImpl(
      name, key, std::move(kernel), std::move(signature), nullptr, "eagercache"));
}

Status Runtime::register_autograd(const std::string& name, const std::string& dispatch_key,
                                  const std::string& backward) {
  OperatorHook* const hook = find_hook(name, "", dispatch_key);
  OperatorHook* const backward_hook =
      backward.empty() ? nullptr : find_hook(backward, "", dispatch_key);
  if (hook == nullptr || (backward_hook == nullptr && !backward.empty())) {
    return Status(StatusCode::kInvalidArgument, name + " is not hooked at " + dispatch_key);
  }
  const c10::DispatchKey key =
      c10::getAutogradKeyFromBackend(c10::toBackendComponent(hook->dispatch_key()));
  const Lock lock(registry_mutex_);
  auto& slot = autograd_[hook_key(name, "", dispatch_key)];
  if (slot) {
    return Status();
  }
  try {
    auto autograd = std::make_unique<FunctionAutograd>(*hook, key, backward_hook);
    put_implementation({name, ""}, key, make_boxed(*autograd), std::nullopt);
    slot = std::move(autograd);
    return Status();
  } catch (const std::exception& error) {
    return Status(StatusCode::kUnsupported,
                  name + ": its gradient could not be registered: " + error.what());
  }
}

void Runtime::set_identity(OperatorHook& hook, const std::string& identity) {
  const std::string before = hook.identity();
  if (before == identity) {
    return;
  }
  hook.set_identity(identity);
  hook.set_aside(hook.is_function() && functions_aside_.load());
  if (!before.empty()) {
    verdict_generation.fetch_add(1, std::memory_order_acq_rel);
    hook.table().clear();
    hook.classes().clear();
    hook.scalars().clear();
  }
}

void Runtime::set_functions_aside(bool aside) {
  functions_aside_.store(aside);
  for (OperatorHook* hook : hooks()) {
    if (hook->is_function()) {
      hook->set_aside(aside);
    }
  }
}

OperatorHook* Runtime::find_hook(const std::string& name, const std::string& overload,
                                 const std::string& dispatch_key) const {
  const Lock lock(registry_mutex_);
  const auto found = hooks_.find(hook_key(name, overload, dispatch_key));
  return found == hooks_.end() ? nullptr : found->second.get();
}

std::vector<OperatorHook*> Runtime::hooks() const {
  const Lock lock(registry_mutex_);
  std::vector<OperatorHook*> all;
  all.reserve(hooks_.size());
  for (const auto& [key, hook] : hooks_) {
    all.push_back(hook.get());
  }
  return all;
}

void Runtime::set_policy(const Policy& policy) {
  policy_.store(policy, std::memory_order_relaxed);
  verdict_generation.fetch_add(1, std::memory_order_acq_rel);
  requests_.store(0, std::memory_order_relaxed);
  for (OperatorHook* hook : hooks()) {
    hook->table().clear();
    hook->classes().clear();
    hook->scalars().clear();
  }
  // Who waits for the first kernel of a key, or wants no other answer, wants every call looked at.
  const bool runs = policy.on_miss != OnMiss::kWait && policy.choose == Choose::kFaster;
  static std::atomic<std::uint32_t> epochs{0};
  call_trials::clear();
  call_trials::set_on(policy.trials && policy.on_miss == OnMiss::kBackground && !policy.replicas);
  native_run_epoch.store(runs ? ++epochs : 0, std::memory_order_relaxed);
}

std::string Runtime::policy_tag() const {
  // Entries of the two choices do not replace each other: one stores losing kernels, the other only
  // the decision.
  return policy().choose == Choose::kAlways ? "always" : "faster";
}

void Runtime::set_store(std::shared_ptr<DiskStore> store) {
  const Lock lock(registry_mutex_);
  store_ = std::move(store);
}

std::shared_ptr<DiskStore> Runtime::store() const {
  const Lock lock(registry_mutex_);
  return store_;
}

void Runtime::set_handler(std::shared_ptr<MissHandler> handler) {
  const Lock lock(registry_mutex_);
  handler_ = std::move(handler);
}

void Runtime::freeze() noexcept {
  kernels_frozen.store(true);
  while (installing_.load() != 0) {
    std::this_thread::yield();  // an insert into a table
  }
}

bool Runtime::set_answering(bool answering) {
  if (answering && forked()) {
    return false;
  }
  if (answering) {
    prepare_epoch();
  }
  hooks_answer.store(answering, std::memory_order_relaxed);
  return true;
}

namespace {

double number_of(const std::map<std::string, std::string>& facts, const char* name) {
  const auto found = facts.find(name);
  const double value = found == facts.end() ? 0 : std::strtod(found->second.c_str(), nullptr);
  return std::isfinite(value) ? value : 0;
}

}  // namespace

std::vector<VerdictOutcome> Runtime::outcomes(const OperatorHook& hook) const {
  const Lock lock(verdicts_mutex_);
  std::vector<VerdictOutcome> all;
  if (const auto found = verdicts_.find(&hook); found != verdicts_.end()) {
    all.reserve(found->second.size());
    for (const auto& [digest, verdict] : found->second) {
      all.push_back({digest, verdict.decision, number_of(verdict.facts, "native_ns"),
                     number_of(verdict.facts, "kernel_ns")});
    }
  }
  return all;
}

std::vector<VerdictRecord> Runtime::verdicts(const OperatorHook& hook) const {
  const Lock lock(verdicts_mutex_);
  std::vector<VerdictRecord> all;
  if (const auto found = verdicts_.find(&hook); found != verdicts_.end()) {
    for (const auto& [digest, verdict] : found->second) {
      all.push_back(verdict);
    }
  }
  return all;
}

}  // namespace eagercache
