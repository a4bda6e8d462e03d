#include "dispatcher/observe/explain.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>

#include "dispatcher/base/log.h"
#include "dispatcher/runtime/denied_call.h"
#include "dispatcher/runtime/runtime.h"

namespace eagercache {
namespace {

thread_local bool thread_explains = false;

const char* state_name(EntryState state) {
  switch (state) {
    case EntryState::kKernel:
      return "kernel";
    case EntryState::kNative:
      return "native";
    default:
      return "pending";
  }
}

// How far apart two keys are: words that differ, those that one has not included. A key without a
// verdict is of less help than any that has one.
std::size_t distance(std::span<const Word> left, std::span<const Word> right, EntryState state) {
  const std::size_t shorter = std::min(left.size(), right.size());
  std::size_t words = std::max(left.size(), right.size()) - shorter;
  for (std::size_t i = 0; i < shorter; ++i) {
    words += left[i] == right[i] ? 0 : 1;
  }
  return state == EntryState::kPending ? words + KeyBuffer::kCapacity : words;
}

// The key that the table knows and that differs least from the call's.
struct Nearest {
  std::vector<Word> words;
  EntryState state = EntryState::kAbsent;
};

Nearest nearest_known(const OperatorHook& hook, std::span<const Word> words) {
  Nearest nearest;
  std::size_t smallest = std::numeric_limits<std::size_t>::max();
  hook.table().for_each([&](std::span<const Word> key, Found found, std::uint64_t /*calls*/) {
    const std::size_t apart = distance(words, key, found.state);
    if (apart < smallest && !std::ranges::equal(words, key)) {
      smallest = apart;
      nearest = {{key.begin(), key.end()}, found.state};
    }
  });
  return nearest;
}

// How often a known key was met.
std::uint64_t calls_of(const OperatorHook& hook, std::span<const Word> words) {
  std::uint64_t found = 0;
  hook.table().for_each([&](std::span<const Word> key, Found /*found*/, std::uint64_t calls) {
    found = std::ranges::equal(words, key) ? calls : found;
  });
  return found;
}

// Why a key has no verdict in this process yet.
std::string missing_reason(const OperatorHook& hook, std::span<const Word> words, EntryState state,
                           const CallExplanation& explained) {
  const Runtime& runtime = Runtime::instance();
  const std::shared_ptr<DiskStore> store = runtime.store();
  if (store) {
    const std::optional<Digest> key = Digest::from_hex(explained.digest);
    if (const Result<Manifest> manifest = store->find(*key); manifest) {
      return "the store has a verdict, which this process has not loaded yet";
    }
  }
  const bool compiles = store && runtime.policy().on_miss != OnMiss::kNative;
  if (state == EntryState::kPending) {
    if (!compiles) {
      return "it was met before, and nothing is compiled";
    }
    const std::uint64_t calls = calls_of(hook, words);
    const std::uint64_t enough = runtime.calls_before_compile(hook);
    if (calls < enough) {
      return "a kernel is asked for once it was made " + std::to_string(enough) +
             " times; so far: " + std::to_string(calls);
    }
    return "it was met before; its verdict is not there yet";
  }
  return compiles ? "it was not met before" : "it was not met before, and nothing is compiled";
}

// What the call's scalar class says of it.
EntryState state_of_class(OperatorHook& hook, std::span<const Word> words) {
  ScalarClasses::Numbers numbers;
  return hook.scalars().find(words, numbers).state;
}

void explain_key(OperatorHook& hook, const CallView& view, CallExplanation& explained) {
  const std::span<const Word> words = view.key.words();
  Runtime& runtime = Runtime::instance();
  explained.digest = hook.entry_digest(words, runtime.policy_tag()).hex();
  explained.call_json = describe_call(words, hook.plan().names);
  const Found found = hook.table().find(words, hash_words(words));
  for (VerdictRecord& verdict : runtime.verdicts(hook)) {
    if (verdict.digest == explained.digest) {
      explained.facts = std::move(verdict.facts);
      explained.reason = std::move(verdict.reason);
    }
  }
  if (found.state == EntryState::kKernel) {
    explained.outcome = "hit";
    explained.reason = "a kernel answers";
  } else if (found.state == EntryState::kNative) {
    explained.outcome = "native";
  } else if (const EntryState of_class = state_of_class(hook, words);
             of_class != EntryState::kAbsent) {
    const bool answers = of_class == EntryState::kKernel;
    explained.outcome = answers ? "hit" : "native";
    explained.reason = answers ? "a kernel that takes the call's numbers as arguments answers"
                               : "a kernel that takes the call's numbers was not faster";
  } else if (std::string denial = denied_call(hook, words); !denial.empty()) {
    // What the loader finds once the call is made.
    explained.outcome = "native";
    explained.reason = std::move(denial);
  } else {
    explained.outcome = "miss";
    explained.reason = missing_reason(hook, words, found.state, explained);
    const Nearest nearest = nearest_known(hook, words);
    if (nearest.state != EntryState::kAbsent) {
      explained.difference = first_difference(words, nearest.words, hook.plan().names);
      explained.nearest_json = describe_call(nearest.words, hook.plan().names);
      explained.nearest_state = state_name(nearest.state);
    }
  }
}

CallExplanation explain_call(OperatorHook& hook, const torch::jit::Stack& stack) {
  CallExplanation explained;
  explained.op = hook.full_name();
  explained.dispatch_key = c10::toString(hook.dispatch_key());
  if (!hooks_answer.load(std::memory_order_relaxed)) {
    explained.outcome = "native";
    explained.reason = Runtime::instance().forked() ? "this process was forked" : "disabled";
    return explained;
  }
  if (!hook.active()) {
    explained.outcome = "native";
    explained.reason = "the operator is not among those enabled";
    return explained;
  }
  CallView view;
  if (const AsideReason reason = hook.read_call(stack, view); reason != AsideReason::kNone) {
    explained.outcome = "aside";
    explained.reason = aside_reason_name(reason);
    return explained;
  }
  explain_key(hook, view, explained);
  return explained;
}

}  // namespace

Explainer::Explainer() {
  if (thread_explains) {
    throw std::logic_error("this thread is explaining a call already");
  }
  thread_explains = true;
  attach();
}

Explainer::~Explainer() {
  detach();
  thread_explains = false;
}

bool Explainer::waits_for(const OperatorHook& /*hook*/) const noexcept {
  return !InsideGuard::nested();
}

bool Explainer::take_call(OperatorHook& hook, c10::DispatchKeySet /*keys*/,
                          torch::jit::Stack* stack) {
  try {
    calls_.push_back(explain_call(hook, *stack));
  } catch (const std::exception& error) {
    log_line(LogLevel::kWarning, std::string("a call could not be explained: ") + error.what());
  }
  return false;
}

}  // namespace eagercache
