// Runtime: kernels that take numbers of the call as arguments (their way: runtime_classes.cc).
// Calls that one answers get no entry of their own: a learning rate that changes with every step
// would fill the table.

#include <array>
#include <utility>

#include "dispatcher/runtime/runtime.h"

namespace eagercache {

bool Runtime::has_scalar_classes(const OperatorHook& hook) const {
  return policy().shape_classes && !hook.is_function();
}

bool Runtime::ask_for_scalars(OperatorHook& hook, std::span<const Word> words) {
  return hook.scalars().next_step(words, 0, ~std::uint64_t{0}) == ScalarClasses::Step::kAsk &&
         ask_for_kernel_of(hook, words, {ClassKernel::Kind::kScalars});
}

Runtime::ClassVerdict Runtime::put_scalars(OperatorHook& hook, std::span<const Word> words,
                                           LoadedKernel* loaded, const Manifest& manifest) {
  if (for_replicas(loaded, manifest) != loaded) {
    return {"native", "not bitwise, and this process is one of several replicas"};
  }
  auto* const kernel = dynamic_cast<ScalarKernel*>(loaded);
  std::vector<Word> own(words.size());
  std::array<double, kMaxScalars> numbers;
  if (kernel == nullptr || kernel->num_scalars() == 0 ||
      kernel->num_scalars() != scalar_class(words, own, numbers)) {
    return {"failed", "the entry is not of this scalar class"};
  }
  hook.scalars().put(words, kernel);
  return {"kernel", {}};
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
    return join_in_flight(class_digest(hook, pending.words, {ClassKernel::Kind::kScalars}),
                          pending);
  }
  if (step != ScalarClasses::Step::kCompile) {
    return false;
  }
  hand_over(pending, {ClassKernel::Kind::kScalars},
            {.scalar_class = scalar_class_of(pending.words)});
  return true;
}

}  // namespace eagercache
