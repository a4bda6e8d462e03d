#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "dispatcher/hook/integer_samples.h"
#include "dispatcher/hook/operator_hook.h"

namespace eagercache {

// One call of an operator as a JSON object: docs of describe_call() plus "op", "overload",
// "dispatch_key", "digest" (its key in the store), "identity" (of an operator that is a function),
// "calls" (how often it was made), "native_ns" (what native takes; left out when 0) and "integers"
// (what its integer tensors held: "tensor", "whole" and "values" of each; left out when there are
// none). It is what the compile service is asked with and what a recorded trace holds a line of.
std::string operator_call_json(const OperatorHook& hook, std::span<const Word> words,
                               const std::string& digest, std::uint64_t calls,
                               std::uint64_t native_ns,
                               std::span<const IntegerSample> integers = {});

}  // namespace eagercache
