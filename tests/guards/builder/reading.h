#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <ostream>
#include <string>
#include <vector>

#include "guards/builder/aside_reason.h"
#include "guards/key/call_key.h"

namespace eagercache {

inline void PrintTo(AsideReason reason, std::ostream* out) { *out << aside_reason_name(reason); }

// What build_key makes of one call.
struct Reading {
  AsideReason reason = AsideReason::kNone;
  std::vector<Word> words;  // empty when the call steps aside
  std::size_t tensors = 0;  // kernel inputs

  // The key, decoded. Fails the test when the words are not a key.
  DecodedCall decoded() const;
  // The only argument, decoded. Fails the test when there are more.
  DecodedArgument argument() const;

  friend bool operator==(const Reading&, const Reading&) = default;
};
void PrintTo(const Reading& reading, std::ostream* out);

using Values = std::vector<c10::IValue>;

// Reads a call of an operator of ATen ("aten::addmm.out" form); every argument must be given.
Reading read_aten(const std::string& name, const Values& arguments);
// Reads a call of an operator with this argument list ("Tensor x, int[] dims").
Reading read_as(const std::string& arguments_text, const Values& arguments);
// Reads a call that takes one tensor.
Reading read_tensor(const at::Tensor& tensor);

// Lists as they are on a boxed stack.
c10::IValue tensor_list(std::vector<at::Tensor> tensors);
c10::IValue optional_tensor_list(const std::vector<std::optional<at::Tensor>>& tensors);
c10::IValue scalar_list(const std::vector<at::Scalar>& scalars);
c10::IValue bool_list(const std::vector<bool>& values);

// A tensor made of a Python number, as `x + 1.5` hands it to the dispatcher.
at::Tensor wrapped_number(double value);

}  // namespace eagercache
