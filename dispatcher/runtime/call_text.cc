#include "dispatcher/runtime/call_text.h"

#include <nlohmann/json.hpp>

#include "dispatcher/plans/admitted_calls.h"
#include "guards/key/call_key_json.h"

namespace eagercache {

std::string operator_call_json(const OperatorHook& hook, std::span<const Word> words,
                               const CallRequest& request) {
  nlohmann::json call = call_description(words, hook.plan().names);
  call["op"] = hook.name();
  call["overload"] = hook.overload();
  call["dispatch_key"] = c10::toString(hook.dispatch_key());
  call["digest"] = request.digest;
  if (hook.is_function()) {
    call["identity"] = hook.identity();
  }
  call["calls"] = request.calls;
  if (request.native_ns != 0) {
    call["native_ns"] = request.native_ns;
  }
  for (const IntegerSample& sample : request.integers) {
    call["integers"].push_back(
        {{"tensor", sample.tensor}, {"whole", sample.whole}, {"values", sample.values}});
  }
  if (!request.scalar_class.empty()) {
    call["kind"] = "scalars";
    call["class_args"] = call_description(request.scalar_class, hook.plan().names)["args"];
  } else if (request.pattern != nullptr) {
    call["kind"] = "shapes";
    call["pattern"] = pattern_json(*request.pattern);
  }
  if (request.measured > 0) {
    call["again"] = request.measured;
  } else if (!request.left_to_do.empty()) {
    call["again"] = request.left_to_do;
  }
  return call.dump();
}

}  // namespace eagercache
