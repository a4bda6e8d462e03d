#include "dispatcher/runtime/call_text.h"

#include <nlohmann/json.hpp>

namespace eagercache {

std::string operator_call_json(const OperatorHook& hook, std::span<const Word> words,
                               const std::string& digest, std::uint64_t calls,
                               std::uint64_t native_ns, std::span<const IntegerSample> integers) {
  nlohmann::json call = nlohmann::json::parse(describe_call(words, hook.plan().names));
  call["op"] = hook.name();
  call["overload"] = hook.overload();
  call["dispatch_key"] = c10::toString(hook.dispatch_key());
  call["digest"] = digest;
  if (hook.is_function()) {
    call["identity"] = hook.identity();
  }
  call["calls"] = calls;
  if (native_ns != 0) {
    call["native_ns"] = native_ns;
  }
  for (const IntegerSample& sample : integers) {
    call["integers"].push_back(
        {{"tensor", sample.tensor}, {"whole", sample.whole}, {"values", sample.values}});
  }
  return call.dump();
}

}  // namespace eagercache
