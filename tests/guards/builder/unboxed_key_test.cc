// A call that comes unboxed has the key of the same call on a boxed stack.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <limits>

#include "dispatcher/hook/unboxed_hooks.h"
#include "dispatcher/operators/eligibility.h"
#include "dispatcher/runtime/runtime.h"
#include "guards/builder/unboxed_key.h"
#include "tests/guards/builder/reading.h"

namespace eagercache {
namespace {

template <typename T>
Reading read_unboxed(const std::string& type, const T& value) {
  const auto op = torch::jit::parseSchema("test::op(" + type + " x) -> Tensor");
  const PlanResult planned = make_argument_plan(op);
  const UnboxedKind kind = unboxed_kind<T>();
  EXPECT_TRUE(fits(kind, planned.plan.readers.front())) << type;
  const void* values[] = {&value};
  CallView view;
  Reading reading;
  reading.reason =
      build_key(planned.plan, UnboxedArguments{{&kind, 1}, values}, c10::DeviceType::CPU, view);
  if (reading.reason == AsideReason::kNone) {
    reading.words.assign(view.key.words().begin(), view.key.words().end());
    reading.tensors = view.tensors.size();
  }
  return reading;
}

// Whether a call of that one argument has the key `words`.
template <typename T>
bool has_words(const std::string& type, const T& value, const std::vector<Word>& words,
               std::size_t* tensors = nullptr) {
  const auto op = torch::jit::parseSchema("test::op(" + type + " x) -> Tensor");
  const UnboxedKind kind = unboxed_kind<T>();
  const void* values[] = {&value};
  CallTensors call;
  const bool has = has_key(make_argument_plan(op).plan, UnboxedArguments{{&kind, 1}, values},
                           c10::DeviceType::CPU, words, call);
  if (tensors != nullptr) {
    *tensors = call.tensors.size();
  }
  return has;
}

// The call has the key that it is given and no other one.
template <typename T>
void expect_only_key(const std::string& type, const T& value, const Reading& reading) {
  std::size_t tensors = 0;
  EXPECT_TRUE(has_words(type, value, reading.words, &tensors));
  EXPECT_EQ(tensors, reading.tensors);
  for (std::size_t i = 0; i < reading.words.size(); ++i) {
    for (unsigned bit = 0; bit < 64; ++bit) {
      std::vector<Word> other = reading.words;
      other[i] ^= Word{1} << bit;
      EXPECT_FALSE(has_words(type, value, other)) << "bit " << bit << " of word " << i;
    }
    const auto begin = reading.words.begin();
    EXPECT_FALSE(
        has_words(type, value, std::vector<Word>(begin, begin + static_cast<std::ptrdiff_t>(i))));
  }
  std::vector<Word> longer = reading.words;
  longer.push_back(0);
  EXPECT_FALSE(has_words(type, value, longer));
}

template <typename T>
void expect_same(const std::string& type, const T& value, const c10::IValue& boxed) {
  SCOPED_TRACE(type);
  const Reading unboxed = read_unboxed(type, value);
  EXPECT_EQ(unboxed, read_as(type + " x", {boxed}));
  EXPECT_EQ(unboxed.reason, AsideReason::kNone);
  expect_only_key(type, value, unboxed);
}

template <typename T>
void expect_same(const std::string& type, const T& value) {
  expect_same(type, value, c10::IValue(value));
}

TEST(UnboxedKey, TensorsAreEncodedAsBoxedOnesAre) {
  expect_same("Tensor", at::zeros({2, 3}).t());
  expect_same("Tensor", wrapped_number(1.5));
  expect_same("Tensor", at::Tensor());
  expect_same("Tensor?", std::optional<at::Tensor>(at::ones({4}, at::kHalf)));
  expect_same("Tensor?", std::optional<at::Tensor>(at::Tensor()));
  expect_same("Tensor?", std::optional<at::Tensor>());
  const std::vector<at::Tensor> list{at::zeros({2}), at::Tensor(), at::zeros({3}, at::kLong)};
  expect_same("Tensor[]", at::TensorList(list), tensor_list(list));
  expect_same("Tensor[]", at::ITensorListRef(at::TensorList(list)), tensor_list(list));
  const c10::List<at::Tensor> boxed({list[0], list[2]});
  expect_same("Tensor[]", at::ITensorListRef(boxed), c10::IValue(boxed));
}

TEST(UnboxedKey, NumbersAreEncodedAsBoxedOnesAre) {
  for (const std::int64_t value :
       {std::int64_t{0}, std::int64_t{-7}, std::numeric_limits<std::int64_t>::max()}) {
    expect_same("int", value);
    expect_same("int?", std::optional<std::int64_t>(value));
    expect_same("Scalar", at::Scalar(value));
  }
  expect_same("SymInt", c10::SymInt(5), c10::IValue(std::int64_t{5}));
  expect_same("SymInt?", std::optional<c10::SymInt>(-5), c10::IValue(std::int64_t{-5}));
  expect_same("SymInt?", std::optional<c10::SymInt>(), c10::IValue());
  for (const double value : {0.0, -0.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    expect_same("float", value);
    expect_same("float?", std::optional<double>(value));
    expect_same("Scalar?", std::optional<at::Scalar>(value), c10::IValue(value));
  }
  for (const bool value : {false, true}) {
    expect_same("bool", value);
    expect_same("bool?", std::optional<bool>(value));
    expect_same("Scalar", at::Scalar(value));
  }
  expect_same("Scalar", at::Scalar(c10::complex<double>(1, -2)));
  expect_same("int?", std::optional<std::int64_t>(), c10::IValue());
  expect_same("float?", std::optional<double>(), c10::IValue());
  expect_same("bool?", std::optional<bool>(), c10::IValue());
  expect_same("Scalar?", std::optional<at::Scalar>(), c10::IValue());
}

TEST(UnboxedKey, ListsAreEncodedAsBoxedOnesAre) {
  const std::vector<std::int64_t> ints{3, -1, 0};
  const std::vector<c10::SymInt> symbols{3, -1, 0};
  expect_same("int[]", at::IntArrayRef(ints), c10::IValue(ints));
  expect_same("int[]?", at::OptionalIntArrayRef(ints), c10::IValue(ints));
  expect_same("int[]?", at::OptionalIntArrayRef(), c10::IValue());
  expect_same("SymInt[]", c10::SymIntArrayRef(symbols), c10::IValue(ints));
  expect_same("SymInt[]?", at::OptionalSymIntArrayRef(symbols), c10::IValue(ints));
  expect_same("SymInt[]?", at::OptionalSymIntArrayRef(), c10::IValue());
  const std::vector<double> floats{0.5, -0.0};
  expect_same("float[]?", std::optional<at::ArrayRef<double>>(floats), c10::IValue(floats));
  expect_same("float[]?", std::optional<at::ArrayRef<double>>(), c10::IValue());
  expect_same("bool[2]", std::array<bool, 2>{true, false}, bool_list({true, false}));
  expect_same("bool[3]", std::array<bool, 3>{true, false, true}, bool_list({true, false, true}));
  expect_same("bool[4]", std::array<bool, 4>{}, bool_list({false, false, false, false}));
  const std::vector<at::Scalar> scalars{1, 1.0, true, c10::complex<double>(0, 1)};
  expect_same("Scalar[]", at::ArrayRef<at::Scalar>(scalars), scalar_list(scalars));
}

TEST(UnboxedKey, StringsAndTensorOptionsAreEncodedAsBoxedOnesAre) {
  for (const std::string_view text : {"", "none", "longer than a word"}) {
    expect_same("str", text, c10::IValue(std::string(text)));
    expect_same("str?", std::optional<std::string_view>(text), c10::IValue(std::string(text)));
  }
  expect_same("str?", std::optional<std::string_view>(), c10::IValue());
  expect_same("ScalarType", at::kHalf);
  expect_same("ScalarType?", std::optional<at::ScalarType>(at::kBool));
  expect_same("ScalarType?", std::optional<at::ScalarType>(), c10::IValue());
  expect_same("Layout?", std::optional<at::Layout>(at::kStrided));
  expect_same("Layout?", std::optional<at::Layout>(), c10::IValue());
  expect_same("MemoryFormat", at::MemoryFormat::ChannelsLast);
  expect_same("MemoryFormat?", std::optional<at::MemoryFormat>(at::MemoryFormat::Preserve));
  expect_same("MemoryFormat?", std::optional<at::MemoryFormat>(), c10::IValue());
  expect_same("Device?", std::optional<at::Device>(at::Device(at::kCPU)));
  EXPECT_EQ(read_unboxed("Device?", std::optional<at::Device>(at::Device(at::kCUDA, 1))).reason,
            AsideReason::kMixedDevices);
  expect_same("Device?", std::optional<at::Device>(), c10::IValue());
}

TEST(UnboxedKey, TensorsThatStepAsideDoSoInBothForms) {
  const at::Tensor empty = at::zeros({0});
  EXPECT_EQ(read_unboxed("Tensor", empty).reason, AsideReason::kEmptyTensor);
  EXPECT_EQ(read_tensor(empty).reason, AsideReason::kEmptyTensor);
  const at::Tensor sparse = at::zeros({2}).to_sparse();
  EXPECT_EQ(read_unboxed("Tensor", sparse).reason, read_tensor(sparse).reason);
  const at::Tensor dense = at::zeros({2});
  const std::vector<Word> words = read_unboxed("Tensor", dense).words;
  EXPECT_TRUE(has_words("Tensor", dense, words));
  EXPECT_FALSE(has_words("Tensor", sparse, words));
  dense.storage().unsafeGetStorageImpl()->set_data_ptr(
      c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
  EXPECT_EQ(read_unboxed("Tensor", dense).reason, AsideReason::kNoStorage);
  EXPECT_FALSE(has_words("Tensor", dense, words));
}

// Operators that may be hooked at CPU and have a signature of ATen's all have a row that fits.
TEST(UnboxedKey, EveryOperatorOfTheTableHasItsOwnSchemasArguments) {
  std::size_t eligible = 0;
  for (const UnboxedRow& row : unboxed_rows()) {
    const std::string name(row.name);
    const std::size_t dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchema(
        {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    ASSERT_TRUE(op) << name;
    Eligibility eligibility = check_eligibility(*op, c10::DispatchKey::CPU);
    if (!eligibility.eligible) {
      continue;
    }
    ++eligible;
    const OperatorHook hook(*op, c10::DispatchKey::CPU, std::move(eligibility), 0,
                            Runtime::instance());
    EXPECT_EQ(find_unboxed(hook), row.maker) << name;
  }
  RecordProperty("eligible", static_cast<int>(eligible));
  EXPECT_GE(eligible, 800U);
}

}  // namespace
}  // namespace eagercache
