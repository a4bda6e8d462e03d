#include "dispatcher/operators/denied_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace eagercache {
namespace {

constexpr std::array kRows{
    DeniedRow{"aten::abs", "CPU", "", "all of it"},
    DeniedRow{"aten::pow.*", "", "float64", "its last bit"},
};

std::string ask(std::string_view op, std::string_view key, const std::vector<std::string>& dtypes) {
  return denial(op, key, dtypes, kRows);
}

TEST(DeniedOperators, ARowWithoutDtypeDeniesEveryCallAtItsKey) {
  EXPECT_EQ(ask("aten::abs", "CPU", {}), "denied: all of it");
  EXPECT_EQ(ask("aten::abs", "CPU", {"float32"}), "denied: all of it");
  EXPECT_EQ(ask("aten::abs", "CUDA", {"float32"}), "");
  EXPECT_EQ(ask("aten::abs.out", "CPU", {"float32"}), "");
}

TEST(DeniedOperators, ARowWithADtypeDeniesCallsWithSuchATensorAlone) {
  EXPECT_EQ(ask("aten::pow.Scalar", "CUDA", {"float32", "float64"}), "denied: its last bit");
  EXPECT_EQ(ask("aten::pow.Scalar", "CPU", {"float32"}), "");
  EXPECT_EQ(ask("aten::pow.Scalar", "CPU", {}), "");  // eligible: other dtypes are not denied
  EXPECT_EQ(ask("aten::pow_.Scalar", "CPU", {"float64"}), "");
}

TEST(DeniedOperators, OnlyNamedOperatorsAreEverDenied) {
  EXPECT_TRUE(is_ever_denied("aten::pow.Tensor_Tensor", kRows));
  EXPECT_FALSE(is_ever_denied("aten::add.Tensor", kRows));
}

// A row about an operator that torch has not protects nobody.
TEST(DeniedOperators, EveryRowOfTheTableNamesAnOperator) {
  const auto all = c10::Dispatcher::singleton().getAllOpNames();
  for (const DeniedRow& row : denied_rows()) {
    const auto named = [&row](const c10::OperatorName& name) {
      const std::string full =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      return is_ever_denied(full, {&row, 1});
    };
    EXPECT_TRUE(std::ranges::any_of(all, named)) << row.op;
    EXPECT_TRUE(row.dispatch_key.empty() || row.dispatch_key == "CPU" || row.dispatch_key == "CUDA")
        << row.op;
  }
}

}  // namespace
}  // namespace eagercache
