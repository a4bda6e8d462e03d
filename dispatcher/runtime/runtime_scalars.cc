// Runtime: kernels that take numbers of the call as arguments. A scalar class's kernel is asked
// for, compiled and installed like that of one key, under a key of its own in the store; then it
// stands in ScalarClasses. Calls that it answers get no entry of their own: a learning rate that
// changes with every step would fill the table.

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {

bool Runtime::has_scalar_classes(const OperatorHook& hook) const {
  return policy().shape_classes && hook.device_type() == c10::DeviceType::CPU &&
         !hook.is_function();
}

// Empty where the call has no class.
std::string Runtime::scalar_digest(const OperatorHook& hook, std::span<const Word> words) const {
  const std::vector<Word> own = scalar_class_of(words);
  return own.empty() ? std::string() : hook.entry_digest(own, policy_tag() + "/scalars").hex();
}

// Whether the store had a verdict that answers the class's calls.
bool Runtime::ask_for_scalars(OperatorHook& hook, std::span<const Word> words) {
  if (hook.scalars().next_step(words, 0, ~std::uint64_t{0}) != ScalarClasses::Step::kAsk) {
    return false;
  }
  const std::string digest = scalar_digest(hook, words);
  if (const Result<Manifest> manifest = find_entry(digest); manifest) {
    return install_scalars(hook, words, manifest.value(), digest);
  }
  hook.scalars().note_unknown(words);
  return false;
}

bool Runtime::install_scalars(OperatorHook& hook, std::span<const Word> words,
                              const Manifest& manifest, const std::string& digest) {
  const auto refuse = [&](const std::string& decision, const std::string& reason) {
    hook.scalars().close(words);
    record(hook, words, {digest, {}, decision, reason, manifest.facts});
    return false;
  };
  if (manifest.kind == EntryKind::kNative && manifest.fact("of_all_numbers") == "1") {
    hook.scalars().put_native(words);  // kernels for single numbers would fare no better
    record(hook, words, {digest, {}, "native", manifest.fact("reason"), manifest.facts});
    return true;
  }
  if (manifest.kind != EntryKind::kKernel) {
    return refuse(manifest.kind == EntryKind::kNative ? "native" : "failed",
                  manifest.fact("reason"));
  }
  if (std::string reason = rejected_by_policy(hook, words, manifest); !reason.empty()) {
    return refuse("native", reason);
  }
  Result<LoadedKernel*> loaded = load_kernel(hook, words, manifest);
  if (!loaded) {
    return refuse("failed", loaded.status().message());
  }
  if (for_replicas(loaded.value(), manifest) != loaded.value()) {
    return refuse("native", "not bitwise, and this process is one of several replicas");
  }
  auto* const kernel = dynamic_cast<BareKernel*>(loaded.value());
  std::vector<Word> own(words.size());
  std::array<double, kMaxScalars> numbers;
  if (kernel == nullptr || kernel->num_scalars() == 0 ||
      kernel->num_scalars() != scalar_class(words, own, numbers)) {
    return refuse("failed", "the entry is not of this scalar class");
  }
  if (!put_unless_frozen([&] { hook.scalars().put(words, kernel); })) {
    return false;
  }
  record(hook, words, {digest, {}, "kernel", {}, manifest.facts});
  return true;
}

// True when nothing is left to do for the key: its class has a verdict, or a kernel is under way.
// Tickets that were moved to that kernel are gone from `pending`.
bool Runtime::hand_to_scalars(Pending& pending) {
  OperatorHook& hook = *pending.hook;
  if (!has_scalar_classes(hook)) {
    return false;
  }
  ask_for_scalars(hook, pending.words);
  ScalarClasses::Numbers numbers;
  if (hook.scalars().find(pending.words, numbers).state != EntryState::kAbsent) {
    return true;
  }
  const std::uint64_t enough = enough_calls(hook, pending.native_ns);
  const ScalarClasses::Step step = hook.scalars().next_step(pending.words, pending.calls, enough);
  if (step == ScalarClasses::Step::kUnderWay) {
    // Where it is not: just done; the key asks again.
    return join_in_flight(scalar_digest(hook, pending.words), pending);
  }
  if (step != ScalarClasses::Step::kCompile) {
    return false;
  }
  CompileRequest request;
  request.digest = scalar_digest(hook, pending.words);
  nlohmann::json call = nlohmann::json::parse(operator_call_json(
      hook, pending.words, request.digest, pending.calls, pending.native_ns, pending.integers));
  call["kind"] = "scalars";
  call["class_args"] = nlohmann::json::parse(
      describe_call(scalar_class_of(pending.words), hook.plan().names))["args"];
  request.call_json = call.dump();
  pending.scalars = true;
  Pending handed = std::move(pending);
  pending.tickets.clear();
  submit(std::move(handed), request);
  return true;
}

void Runtime::complete_scalars(Pending& pending, const std::string& digest,
                               const std::string& decision, const std::string& reason) {
  OperatorHook& hook = *pending.hook;
  if (pending.generation != verdict_generation.load(std::memory_order_relaxed) || frozen()) {
    hook.scalars().note_unknown(pending.words);
    return;
  }
  const Result<Manifest> manifest = find_entry(digest);
  if (!manifest) {
    hook.scalars().close(pending.words);
    record(hook, pending.words,
           {digest, {}, decision == "failed" ? "failed" : "native", reason, {}});
  } else if (install_scalars(hook, pending.words, manifest.value(), digest)) {
    return;
  }
  queue_alone(pending);
}

void Runtime::retire_scalars(OperatorHook& hook, std::span<const Word> words,
                             const std::string& reason) {
  if (hook.scalars().retire(words)) {
    put_aside(scalar_digest(hook, words), reason);
  }
}

}  // namespace eagercache
