#pragma once

#include <ATen/core/stack.h>

#include <map>
#include <string>
#include <vector>

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
class Explainer {
 public:
  Explainer();
  ~Explainer();
  Explainer(const Explainer&) = delete;
  Explainer& operator=(const Explainer&) = delete;

  const std::vector<CallExplanation>& calls() const noexcept { return calls_; }

  // The thread's explainer, unless the thread is inside a native kernel by now: what that calls is
  // not the caller's. Reads thread-locals only.
  static Explainer* current() noexcept;
  // Called by hooks before native answers. Never throws: without memory a call stays unexplained.
  void take_call(OperatorHook& hook, const torch::jit::Stack& stack) noexcept;

 private:
  InsideGuard inside_;
  std::vector<CallExplanation> calls_;
};

}  // namespace eagercache
