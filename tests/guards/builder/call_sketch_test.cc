// A sketch is shared by calls of one key, and tells most others apart.

#include "guards/builder/call_sketch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

namespace eagercache {
namespace {

// Of a call with two tensors and a number.
std::uint64_t sketch_of(const at::Tensor& x, const at::Tensor& y, const at::Scalar& number) {
  constexpr std::array kKinds{UnboxedKind::kTensor, UnboxedKind::kTensor, UnboxedKind::kScalar};
  const std::array<const void*, 3> values{&x, &y, &number};
  return sketch_call(UnboxedArguments{kKinds, values.data()}, c10::DeviceType::CPU);
}

std::uint64_t boxed_sketch_of(const std::vector<c10::IValue>& values) {
  return sketch_call(std::span<const c10::IValue>(values), c10::DeviceType::CPU);
}

TEST(CallSketch, IsThatOfAnyCallOfTheKey) {
  const at::Tensor x = at::zeros({2, 3});
  EXPECT_EQ(sketch_of(x, x, 1), sketch_of(at::ones({2, 3}), at::ones({2, 3}), 1));
  EXPECT_EQ(boxed_sketch_of({x, x, 1}), boxed_sketch_of({at::ones({2, 3}), at::ones({2, 3}), 1}));
}

TEST(CallSketch, TellsSizesDtypesStridesAndNumbersApart) {
  const at::Tensor x = at::zeros({2, 3});
  const std::vector<std::pair<at::Tensor, at::Scalar>> calls{{x, 1},
                                                             {at::zeros({3, 2}), 1},
                                                             {at::zeros({6}), 1},
                                                             {at::zeros({}), 1},
                                                             {x.to(at::kDouble), 1},
                                                             {at::zeros({3, 2}).t(), 1},
                                                             {x, 2},
                                                             {x, 0.5}};
  std::set<std::uint64_t> unboxed;
  std::set<std::uint64_t> boxed;
  for (const auto& [y, number] : calls) {
    unboxed.insert(sketch_of(x, y, number));
    boxed.insert(boxed_sketch_of({x, y, number}));
  }
  EXPECT_EQ(unboxed.size(), calls.size());
  EXPECT_EQ(boxed.size(), calls.size());
}

TEST(CallSketch, OfAListIsItsLengthAndItsFirstTensor) {
  constexpr std::array kKinds{UnboxedKind::kTensorList};
  const auto of = [&](const std::vector<at::Tensor>& tensors) {
    const at::TensorList list(tensors);
    const std::array<const void*, 1> values{&list};
    return sketch_call(UnboxedArguments{kKinds, values.data()}, c10::DeviceType::CPU);
  };
  const at::Tensor x = at::zeros({2});
  EXPECT_NE(of({x, x}), of({x}));
  EXPECT_NE(of({x, x}), of({at::zeros({3}), x}));
  EXPECT_NE(of({}), 0U);
}

TEST(CallSketch, ThereIsNoneOfUnusualTensors) {
  const at::Tensor x = at::zeros({2});
  const at::Tensor sparse = at::eye(2).to_sparse();
  EXPECT_EQ(sketch_of(x, sparse, 1), 0U);
  EXPECT_EQ(boxed_sketch_of({x, sparse, 1}), 0U);
  EXPECT_NE(sketch_of(x, at::Tensor(), 1), 0U);
}

}  // namespace
}  // namespace eagercache
