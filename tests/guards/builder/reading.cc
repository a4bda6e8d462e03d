#include "tests/guards/builder/reading.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <utility>

#include "guards/builder/key_builder.h"

namespace eagercache {
namespace {

Reading read_call(const c10::FunctionSchema& schema, const Values& arguments) {
  const PlanResult planned = make_argument_plan(schema);
  EXPECT_EQ(planned.refusal, "");
  EXPECT_EQ(planned.plan.readers.size(), arguments.size());
  CallView view;
  Reading reading;
  reading.reason = build_key(planned.plan, arguments, c10::DeviceType::CPU, view);
  if (reading.reason == AsideReason::kNone) {
    reading.words.assign(view.key.words().begin(), view.key.words().end());
    reading.tensors = view.tensors.view().size();
  }
  return reading;
}

}  // namespace

DecodedCall Reading::decoded() const {
  DecodedCall call;
  EXPECT_TRUE(decode_call(words, &call)) << "the words are not a key";
  KeyBuffer again;
  EXPECT_TRUE(encode_call(call, &again));
  EXPECT_EQ(std::vector<Word>(again.words().begin(), again.words().end()), words);
  return call;
}

DecodedArgument Reading::argument() const {
  const DecodedCall call = decoded();
  EXPECT_EQ(call.arguments.size(), 1U);
  return call.arguments.empty() ? DecodedArgument{} : call.arguments.front();
}

void PrintTo(const Reading& reading, std::ostream* out) {
  *out << (reading.reason == AsideReason::kNone ? describe_call(reading.words)
                                                : std::string(aside_reason_name(reading.reason)));
}

Reading read_aten(const std::string& name, const Values& arguments) {
  const std::size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
  return read_call(op.schema(), arguments);
}

Reading read_as(const std::string& arguments_text, const Values& arguments) {
  return read_call(torch::jit::parseSchema("test::op(" + arguments_text + ") -> Tensor"),
                   arguments);
}

Reading read_tensor(const at::Tensor& tensor) { return read_as("Tensor x", {tensor}); }

c10::IValue tensor_list(std::vector<at::Tensor> tensors) { return c10::IValue(std::move(tensors)); }

c10::IValue optional_tensor_list(const std::vector<std::optional<at::Tensor>>& tensors) {
  c10::List<std::optional<at::Tensor>> list;
  for (const auto& tensor : tensors) {
    list.push_back(tensor);
  }
  return list;
}

c10::IValue scalar_list(const std::vector<at::Scalar>& scalars) {
  c10::impl::GenericList list(c10::NumberType::get());
  for (const at::Scalar& scalar : scalars) {
    list.push_back(c10::IValue(scalar));
  }
  return list;
}

c10::IValue bool_list(const std::vector<bool>& values) {
  c10::List<bool> list;
  for (const bool value : values) {
    list.push_back(value);
  }
  return list;
}

at::Tensor wrapped_number(double value) {
  at::Tensor tensor = at::scalar_tensor(value, at::kDouble);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

}  // namespace eagercache
