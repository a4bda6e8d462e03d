// Calls that step aside to native, rule by rule.

#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <gtest/gtest.h>

#include <limits>

#include "guards/builder/key_builder.h"
#include "tests/guards/builder/reading.h"

#if __has_include(<ATen/NamedTensorUtils.h>)
#include <ATen/NamedTensorUtils.h>
#endif

namespace eagercache {
namespace {

constexpr std::int64_t kTwoTo31 = std::int64_t{1} << 31;

AsideReason reason_of(const at::Tensor& tensor) { return read_tensor(tensor).reason; }

TEST(AsideReason, APlainTensorHasAKey) { EXPECT_EQ(reason_of(at::zeros({4})), AsideReason::kNone); }

TEST(AsideReason, SparseTensorsStepAside) {
  const at::Tensor dense = at::eye(4);
  EXPECT_EQ(reason_of(dense.to_sparse()), AsideReason::kTensorKind);
  EXPECT_EQ(reason_of(dense.to_sparse_csr()), AsideReason::kTensorKind);
}

TEST(AsideReason, QuantizedTensorsStepAside) {
  EXPECT_EQ(reason_of(at::quantize_per_tensor(at::zeros({4}), 0.1, 0, at::kQUInt8)),
            AsideReason::kTensorKind);
}

TEST(AsideReason, NestedTensorsStepAside) {
  EXPECT_EQ(reason_of(at::_nested_tensor_from_tensor_list({at::zeros({2}), at::zeros({3})})),
            AsideReason::kTensorKind);
}

TEST(AsideReason, MetaTensorsStepAside) {
  EXPECT_EQ(reason_of(at::empty({4}, at::TensorOptions().device(at::kMeta))),
            AsideReason::kTensorKind);
}

TEST(AsideReason, ConjugatedNegatedAndZeroTensorsStepAside) {
  EXPECT_EQ(reason_of(at::zeros({4}, at::kComplexFloat).conj()), AsideReason::kTensorKind);
  EXPECT_EQ(reason_of(at::_neg_view(at::zeros({4}))), AsideReason::kTensorKind);
  EXPECT_EQ(reason_of(at::_efficientzerotensor({4})), AsideReason::kTensorKind);
}

TEST(AsideReason, TensorsThatPythonDispatchesStepAside) {
  at::Tensor tensor = at::zeros({4});
  tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  EXPECT_EQ(reason_of(tensor), AsideReason::kTensorKind);
  tensor.unsafeGetTensorImpl()->set_python_dispatch(false);
}

TEST(AsideReason, ASparseTensorAmongPlainOnesStepsAside) {
  const at::Tensor plain = at::zeros({4, 4});
  EXPECT_EQ(read_aten("aten::cat", {tensor_list({plain, at::eye(4).to_sparse()}), 0}).reason,
            AsideReason::kTensorKind);
  EXPECT_EQ(read_aten("aten::index.Tensor",
                      {plain, optional_tensor_list({std::nullopt, at::eye(4).to_sparse()})})
                .reason,
            AsideReason::kTensorKind);
}

TEST(AsideReason, AnUndefinedTensorDoesNotStepAside) {
  EXPECT_EQ(read_as("Tensor? x", {at::Tensor()}).reason, AsideReason::kNone);
}

TEST(AsideReason, EmptyTensorsStepAside) {
  EXPECT_EQ(reason_of(at::zeros({0})), AsideReason::kEmptyTensor);
  EXPECT_EQ(reason_of(at::zeros({4, 0, 4})), AsideReason::kEmptyTensor);
}

TEST(AsideReason, AStorageThatWasResizedToNothingStepsAside) {
  const at::Tensor tensor = at::zeros({4});
  at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), 0);
  ASSERT_EQ(tensor.numel(), 4);
  EXPECT_EQ(reason_of(tensor), AsideReason::kNoStorage);
}

TEST(AsideReason, MoreElementsThan31BitsCountStepAside) {
  const at::Tensor one = at::zeros({1});
  EXPECT_EQ(reason_of(one.expand({kTwoTo31 - 1})), AsideReason::kNone);
  EXPECT_EQ(reason_of(one.expand({kTwoTo31})), AsideReason::kLargeExtent);
  EXPECT_EQ(reason_of(one.expand({std::int64_t{1} << 40, std::int64_t{1} << 20})),
            AsideReason::kLargeExtent);
}

TEST(AsideReason, ElementOffsetsThatNeedMoreThan31BitsStepAside) {
  float value = 0;  // never read: only sizes and strides are
  const auto reaching = [&value](std::int64_t offset) {
    return at::from_blob(&value, {2}, {offset}, at::kFloat);
  };
  EXPECT_EQ(reason_of(reaching(kTwoTo31 - 1)), AsideReason::kNone);
  EXPECT_EQ(reason_of(reaching(kTwoTo31)), AsideReason::kLargeExtent);
}

TEST(AsideReason, AnExtentThatDoesNotFit64BitsIsNotMistakenForASmallOne) {
  float value = 0;
  at::Tensor tensor = at::from_blob(&value, {1}, {1}, at::kFloat);
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(std::vector<std::int64_t>{2, 2, 2, 2, 2},
                                                      std::vector<std::int64_t>(5, kHuge));
  EXPECT_EQ(reason_of(tensor), AsideReason::kLargeExtent);
}

TEST(AsideReason, RareDtypesStepAside) {
  for (const at::ScalarType dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexHalf,
                                     at::kUInt16, at::kUInt32, at::kUInt64}) {
    EXPECT_EQ(reason_of(at::empty({4}, dtype)), AsideReason::kDtype) << c10::toString(dtype);
  }
}

#if __has_include(<ATen/NamedTensorUtils.h>)
TEST(AsideReason, NamedTensorsStepAside) {
  at::Tensor tensor = at::zeros({4});
  const std::vector<at::Dimname> names{at::Dimname::fromSymbol(c10::Symbol::dimname("rows"))};
  at::internal_set_names_inplace(tensor, names);
  EXPECT_EQ(reason_of(tensor), AsideReason::kNamedTensor);
}
#endif

// A symbol without meaning: no value can be asked of it.
class Symbol final : public c10::SymNodeImpl {
 public:
  enum class Type { kInt, kFloat, kBool };
  explicit Symbol(Type type) : type_(type) {}
  bool is_int() override { return type_ == Type::kInt; }
  bool is_float() override { return type_ == Type::kFloat; }
  bool is_bool() override { return type_ == Type::kBool; }
  std::optional<std::int64_t> maybe_as_int() override { return std::nullopt; }

 private:
  Type type_;
};

c10::SymInt symbolic_int() {
  return c10::SymInt(c10::SymNode(c10::make_intrusive<Symbol>(Symbol::Type::kInt)));
}

TEST(AsideReason, SymbolicNumbersStepAside) {
  const c10::SymFloat number(c10::SymNode(c10::make_intrusive<Symbol>(Symbol::Type::kFloat)));
  const c10::SymBool flag(c10::SymNode(c10::make_intrusive<Symbol>(Symbol::Type::kBool)));
  EXPECT_EQ(read_as("SymInt x", {symbolic_int()}).reason, AsideReason::kSymbolic);
  EXPECT_EQ(read_as("Scalar x", {number}).reason, AsideReason::kSymbolic);
  EXPECT_EQ(read_as("bool x", {flag}).reason, AsideReason::kSymbolic);
}

c10::IValue symbolic_list(const std::vector<c10::SymInt>& values) {
  c10::impl::GenericList list(c10::SymIntType::get());
  for (const c10::SymInt& value : values) {
    list.push_back(c10::IValue(value));
  }
  return list;
}

TEST(AsideReason, ASymbolicIntAmongPlainOnesStepsAside) {
  EXPECT_EQ(read_as("SymInt[] x", {symbolic_list({c10::SymInt(4), symbolic_int()})}).reason,
            AsideReason::kSymbolic);
}

TEST(AsideReason, AListOfSymIntsWithoutASymbolHasTheKeyOfAnIntList) {
  EXPECT_EQ(read_as("SymInt[] x", {symbolic_list({c10::SymInt(4)})}),
            read_as("SymInt[] x", {std::vector<std::int64_t>{4}}));
}

TEST(AsideReason, ValuesThatTheSchemaDidNotPromiseStepAside) {
  for (const char* type :
       {"Tensor", "Tensor[]", "int", "float", "bool", "Scalar", "int[]", "float[]", "bool[]",
        "Scalar[]", "ScalarType", "Layout", "MemoryFormat", "Device"}) {
    EXPECT_EQ(read_as(std::string(type) + " x", {std::string("text")}).reason,
              AsideReason::kUnexpectedValue)
        << type;
  }
  EXPECT_EQ(read_as("str x", {1}).reason, AsideReason::kUnexpectedValue);
  EXPECT_EQ(read_as("int[] x", {std::vector<double>{1.0}}).reason, AsideReason::kUnexpectedValue);
  EXPECT_EQ(read_as("Tensor[] x", {std::vector<double>{1.0}}).reason,
            AsideReason::kUnexpectedValue);
}

TEST(AsideReason, KeysLongerThanTheBufferStepAside) {
  const std::vector<std::int64_t> fits(KeyBuffer::kCapacity - 2, 1);  // state and header
  const std::vector<std::int64_t> too_long(KeyBuffer::kCapacity - 1, 1);
  EXPECT_EQ(read_as("int[] x", {fits}).reason, AsideReason::kNone);
  EXPECT_EQ(read_as("int[] x", {too_long}).reason, AsideReason::kKeyTooLong);
  EXPECT_EQ(read_as("str x", {std::string(KeyBuffer::kCapacity * sizeof(Word), 'x')}).reason,
            AsideReason::kKeyTooLong);
}

TEST(AsideReason, MoreTensorsThanAKernelTakesStepAside) {
  const std::vector<at::Tensor> tensors(TensorArguments::kCapacity + 1, at::scalar_tensor(1.0));
  EXPECT_EQ(read_as("Tensor[] x", {tensor_list(tensors)}).reason, AsideReason::kKeyTooLong);
}

}  // namespace
}  // namespace eagercache
