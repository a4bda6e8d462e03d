// Runtime: kernels with symbolic sizes. A class's kernels are asked for, compiled and installed
// like those of one key, under keys of their own in the store; then they stand in ShapeClasses, and
// each key that one of them admits gets an ordinary entry.

#include <nlohmann/json.hpp>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/call_text.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

// A class is compiled after this many times the calls that one key is compiled after: its kernel
// costs more, and an exact one is quicker to have where sizes settle.
constexpr std::uint64_t kClassCalls = 2;
// A key whose class kernel is slower than native, or failed, gets a kernel of its own after this
// many times as many calls. What was true of the class is likely to be true of it, too: every
// further key of the class must be met twice as often as the one before.
constexpr std::uint64_t kExactBesideClass = 16;

}  // namespace

// Operators that write have kernels for exact sizes only, as has every operator on CUDA.
bool Runtime::has_classes(const OperatorHook& hook) const {
  return policy().shape_classes && hook.device_type() == c10::DeviceType::CPU &&
         !hook.effects().writes_arguments();
}

std::string Runtime::class_digest(const OperatorHook& hook, std::span<const Word> words,
                                  std::size_t number) const {
  std::vector<Word> of_class(words.size());
  if (!class_words(words, of_class)) {
    return {};
  }
  return hook.entry_digest(of_class, policy_tag() + "/class/" + std::to_string(number)).hex();
}

Found Runtime::find_in_class(OperatorHook& hook, std::span<const Word> words, std::uint64_t hash) {
  if (!has_classes(hook)) {
    return {};
  }
  const std::uint64_t generation = verdict_generation.load(std::memory_order_acquire);
  const Found found = hook.classes().find(words);
  if (found.state != EntryState::kKernel || !put_kernel(hook, words, hash, found.kernel)) {
    return found.state == EntryState::kNative ? found : Found{};
  }
  if (generation != verdict_generation.load(std::memory_order_acquire)) {
    hook.table().erase(words, hash);  // the policy changed meanwhile
    return {};
  }
  return found;
}

void Runtime::ask_for_class(OperatorHook& hook, std::span<const Word> words) {
  const std::shared_ptr<DiskStore> files = store();
  if (!files || !has_classes(hook)) {
    return;
  }
  while (const auto number = hook.classes().unasked(words)) {
    const std::string digest = class_digest(hook, words, *number);
    const std::optional<Digest> key = Digest::from_hex(digest);
    if (!key) {
      hook.classes().close(words);
      return;
    }
    Result<Manifest> manifest = files->find(*key);
    if (!manifest) {
      hook.classes().note_unknown(words, *number);
      return;
    }
    if (!install_class(hook, words, *number, manifest.value(), digest)) {
      return;
    }
  }
}

bool Runtime::install_class(OperatorHook& hook, std::span<const Word> words, std::size_t number,
                            const Manifest& manifest, const std::string& digest) {
  const auto refuse = [&](const std::string& decision, const std::string& reason) {
    hook.classes().close(words, decision == "failed");
    record(hook, words, {digest, {}, decision, reason, manifest.facts});
    return false;
  };
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
  const auto* kernel = dynamic_cast<ShapeKernel*>(loaded.value());
  std::vector<Word> own(words.size());
  std::vector<Word> of_pattern;
  if (kernel != nullptr) {
    of_pattern.resize(kernel->pattern().words.size());
  }
  if (kernel == nullptr || !class_words(words, own) ||
      !class_words(kernel->pattern().words, of_pattern) || own != of_pattern) {
    return refuse("failed", "the entry is not of this shape class");
  }
  hook.classes().put(words, number, kernel, for_replicas(loaded.value(), manifest));
  record(hook, words, {digest, {}, "kernel", {}, manifest.facts});
  return true;
}

// True when nothing is left to do for the key: it has an answer, or a kernel for its class is under
// way. Tickets that were moved to that kernel are gone from `pending`.
bool Runtime::hand_to_class(Pending& pending) {
  OperatorHook& hook = *pending.hook;
  if (!has_classes(hook)) {
    return false;
  }
  ask_for_class(hook, pending.words);
  const Found found = find_in_class(hook, pending.words, pending.hash);
  if (found.state == EntryState::kKernel) {
    return true;
  }
  const std::uint64_t after = enough_calls(hook, pending.native_ns);
  if (found.state == EntryState::kNative || hook.classes().failed(pending.words)) {
    return !hook.classes().lets_alone(pending.words, pending.calls, kExactBesideClass * after);
  }
  if (const auto number = hook.classes().under_way(pending.words)) {
    // Where it is not: just done; the key asks again.
    return join_in_flight(class_digest(hook, pending.words, *number), pending);
  }
  const bool waits = policy().on_miss == OnMiss::kWait;
  auto proposal =
      hook.classes().note_call(pending.words, pending.calls, waits ? 1 : kClassCalls * after);
  if (!proposal) {
    return false;
  }
  CompileRequest request;
  request.digest = class_digest(hook, pending.words, proposal->number);
  nlohmann::json call = nlohmann::json::parse(operator_call_json(
      hook, pending.words, request.digest, pending.calls, pending.native_ns, pending.integers));
  call["kind"] = "shapes";
  call["pattern"] = pattern_json(proposal->pattern);
  request.call_json = call.dump();
  pending.class_number = proposal->number;
  Pending handed = std::move(pending);
  pending.tickets.clear();
  submit(std::move(handed), request);
  return true;
}

void Runtime::complete_class(Pending& pending, const std::string& digest,
                             const std::string& decision, const std::string& reason) {
  OperatorHook& hook = *pending.hook;
  const std::size_t number = *pending.class_number;
  if (pending.generation != verdict_generation.load(std::memory_order_relaxed) || frozen()) {
    hook.classes().note_unknown(pending.words, number);
    return;
  }
  const Result<Manifest> manifest = find_entry(digest);
  if (!manifest) {
    hook.classes().close(pending.words, decision == "failed");
    record(hook, pending.words,
           {digest, {}, decision == "failed" ? "failed" : "native", reason, {}});
  } else if (install_class(hook, pending.words, number, manifest.value(), digest)) {
    answer_waiting_keys(hook);
    return;
  }
  queue_alone(pending);
}

// No kernel for its class: the key is on its own.
void Runtime::queue_alone(Pending& pending) {
  Pending alone = std::move(pending);
  pending.tickets.clear();
  alone.class_number.reset();
  alone.scalars = false;
  {
    std::lock_guard lock(queue_mutex_);
    if (!stopping_) {
      queue_.push_back(std::move(alone));
      return;
    }
  }
  finish(alone);
}

// Gives the operator's keys that wait for a verdict the kernel of their class, where one admits
// them.
void Runtime::answer_waiting_keys(OperatorHook& hook) {
  std::vector<std::vector<Word>> waiting;
  hook.table().for_each([&](std::span<const Word> words, Found found, std::uint64_t /*calls*/) {
    if (found.state == EntryState::kPending) {
      waiting.emplace_back(words.begin(), words.end());
    }
  });
  for (const std::vector<Word>& words : waiting) {
    find_in_class(hook, words, hash_words(words));
  }
}

void Runtime::retire_class_kernel(OperatorHook& hook, std::span<const Word> words,
                                  const std::string& reason) {
  const Found wrong = hook.table().find(words, hash_words(words));
  const auto number = hook.classes().retire(words);
  if (!number) {
    return;
  }
  std::vector<std::vector<Word>> answered;
  hook.table().for_each([&](std::span<const Word> other, Found found, std::uint64_t /*calls*/) {
    if (found.state == EntryState::kKernel && found.kernel == wrong.kernel) {
      answered.emplace_back(other.begin(), other.end());
    }
  });
  for (const std::vector<Word>& other : answered) {
    hook.table().set_native(other, hash_words(other));
  }
  put_aside(class_digest(hook, words, *number), reason);
}

}  // namespace eagercache
