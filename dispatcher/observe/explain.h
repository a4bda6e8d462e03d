#pragma once

#include <ATen/core/stack.h>

#include <map>
#include <string>
#include <vector>

#include "dispatcher/hook/call_observer.h"
#include "dispatcher/hook/operator_hook.h"

namespace eagercache {

// What would answer one call of a hooked operator, and why. Nothing is counted, queued or loaded to
// find out.
struct CallExplanation {
  std::string op;
  std::string dispatch_key;
  // "hit", "native" (decided, or not enabled), "aside", "miss" (never met, or no verdict yet).
  std::string outcome;
  std::string reason;
  std::string digest;     // the call's key in the store; empty for "aside"
  std::string call_json;  // describe_call; empty for "aside"
  // The known key that differs from the call's in the fewest words, of those with a verdict if
  // there is one: how it differs (first_difference), what it is and what its verdict is.
  std::string difference;
  std::string nearest_json;
  std::string nearest_state;
  std::map<std::string, std::string> facts;  // the verdict's manifest
};

// While one lives, calls of hooked operators on its thread are answered by native and explained.
// Bound to the thread that made it; one at a time per thread.
class Explainer final : private CallTaker {
 public:
  Explainer();
  ~Explainer();
  Explainer(const Explainer&) = delete;
  Explainer& operator=(const Explainer&) = delete;

  const std::vector<CallExplanation>& calls() const noexcept { return calls_; }

 private:
  // Not inside a native kernel: what that calls is not the caller's.
  bool waits_for(const OperatorHook& hook) const noexcept override;
  // Native answers. Without memory the call stays unexplained.
  bool take_call(OperatorHook& hook, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

  InsideGuard inside_;
  std::vector<CallExplanation> calls_;
};

}  // namespace eagercache
