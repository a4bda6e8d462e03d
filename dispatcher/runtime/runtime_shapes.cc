// Runtime: kernels with symbolic sizes (their way: runtime_classes.cc). Each key that one of them
// admits gets an ordinary entry.

#include <utility>

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

// Operators that write have kernels for exact sizes only.
bool Runtime::has_classes(const OperatorHook& hook) const {
  return policy().shape_classes && !hook.effects().writes_arguments();
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
  if (!store() || !has_classes(hook)) {
    return;
  }
  while (const auto number = hook.classes().unasked(words)) {
    if (!ask_for_kernel_of(hook, words, {ClassKernel::Kind::kShapes, *number})) {
      return;
    }
  }
}

Runtime::ClassVerdict Runtime::put_shapes(OperatorHook& hook, std::span<const Word> words,
                                          std::size_t number, LoadedKernel* loaded,
                                          const Manifest& manifest) {
  const auto* kernel = dynamic_cast<ShapeKernel*>(loaded);
  std::vector<Word> own(words.size());
  std::vector<Word> of_pattern;
  if (kernel != nullptr) {
    of_pattern.resize(kernel->pattern().words.size());
  }
  if (kernel == nullptr || !class_words(words, own) ||
      !class_words(kernel->pattern().words, of_pattern) || own != of_pattern) {
    return {"failed", "the entry is not of this shape class"};
  }
  hook.classes().put(words, number, kernel, for_replicas(loaded, manifest));
  return {"kernel", {}};
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
    return join_in_flight(class_digest(hook, pending.words, {ClassKernel::Kind::kShapes, *number}),
                          pending);
  }
  const bool waits = policy().on_miss == OnMiss::kWait;
  auto proposal =
      hook.classes().note_call(pending.words, pending.calls, waits ? 1 : kClassCalls * after);
  if (!proposal) {
    return false;
  }
  hand_over(pending, {ClassKernel::Kind::kShapes, proposal->number},
            {.pattern = &proposal->pattern});
  return true;
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

// The number of the kernel that answers the call, and from now on none; native answers all keys
// that it answered.
std::optional<std::size_t> Runtime::retire_shapes(OperatorHook& hook, std::span<const Word> words) {
  const Found wrong = hook.table().find(words, hash_words(words));
  const auto number = hook.classes().retire(words);
  if (!number) {
    return std::nullopt;
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
  return number;
}

}  // namespace eagercache
