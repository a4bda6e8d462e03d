#pragma once

// What the compile service is asked, as data and as the text that leaves C++. It is written once,
// here: nothing in this process reads it back. Any thread.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/hook/integer_samples.h"
#include "dispatcher/hook/operator_hook.h"
#include "guards/key/shape_class.h"

namespace eagercache {

// What is said of a call besides its key. Spans and pointers are the caller's.
struct CallRequest {
  std::string digest{};         // its key in the store
  std::uint64_t calls = 1;      // how often it was made
  std::uint64_t native_ns = 0;  // what native takes; 0: not known
  std::span<const IntegerSample> integers{};
  // A kernel for all calls of the call's class is wanted: the words of its scalar class, or the
  // pattern of its shape class. Both are empty for a kernel of this call alone.
  std::vector<Word> scalar_class{};
  const ShapePattern* pattern = nullptr;
  // The key has a verdict, and is looked at again: so often it was measured, or what is left to do.
  int measured = 0;
  std::string left_to_do{};
};

// One call of an operator as a JSON object: docs of describe_call() plus "op", "overload",
// "dispatch_key", "digest", "identity" (of an operator that is a function), "calls", "native_ns"
// (left out when 0) and "integers" (what its integer tensors held: "tensor", "whole" and "values"
// of each; left out when there are none). Of a class: "kind" ("scalars" or "shapes") with
// "class_args" or "pattern". Of a key with a verdict: "again". It is what the compile service is
// asked with, and what a recorded trace holds a line of.
std::string operator_call_json(const OperatorHook& hook, std::span<const Word> words,
                               const CallRequest& request);

}  // namespace eagercache
