#include "dispatcher/runtime/denied_call.h"

#include <vector>

#include "dispatcher/operators/denied_operators.h"

namespace eagercache {
namespace {

void add_dtypes(const std::vector<DecodedArgument>& arguments, std::vector<std::string>& dtypes) {
  for (const DecodedArgument& argument : arguments) {
    if (argument.kind == ArgumentKind::kTensor) {
      dtypes.push_back(scalar_type_name(argument.tensor.dtype));
    }
    add_dtypes(argument.elements, dtypes);
  }
}

}  // namespace

std::string denied_call(const OperatorHook& hook, std::span<const Word> words) {
  if (!is_ever_denied(hook.full_name())) {
    return {};
  }
  DecodedCall call;
  std::vector<std::string> dtypes;
  if (decode_call(words, &call)) {
    add_dtypes(call.arguments, dtypes);
  }
  return denial(hook.full_name(), c10::toString(hook.dispatch_key()), dtypes);
}

}  // namespace eagercache
