#pragma once

// The table of denied operators (denied_operators.h), asked about one call. Any thread.

#include <span>
#include <string>

#include "dispatcher/hook/operator_hook.h"

namespace eagercache {

// Why the table of denied operators has no kernel answer the call; empty when it does not name it.
std::string denied_call(const OperatorHook& hook, std::span<const Word> words);

}  // namespace eagercache
