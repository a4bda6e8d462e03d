// Which calls that write would read or write some memory twice.

#include "guards/builder/overlap.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

namespace eagercache {
namespace {

// Whether a call on `tensors` steps aside when it writes the first `written` of them.
bool overlap(const std::vector<at::Tensor>& tensors, std::size_t written = 1) {
  std::vector<const at::Tensor*> pointers;
  for (const at::Tensor& tensor : tensors) {
    pointers.push_back(&tensor);
  }
  WrittenTensors set;
  set.add(0, written);
  return set.overlap(pointers);
}

at::Tensor matrix() { return at::zeros({6, 4}); }

TEST(WrittenTensors, OfTheirOwnMemoryAreFine) {
  EXPECT_FALSE(overlap({matrix()}));
  EXPECT_FALSE(overlap({matrix(), matrix(), matrix()}, 2));
  EXPECT_FALSE(overlap({at::zeros({})}));
}

TEST(WrittenTensors, MayNotShareMemoryWithAnotherArgument) {
  const at::Tensor x = matrix();
  EXPECT_TRUE(overlap({x, x}));
  EXPECT_TRUE(overlap({x, x.view({4, 6})}));
  EXPECT_TRUE(overlap({x, matrix(), x[2]}));
  EXPECT_TRUE(overlap({x[2], matrix(), x}));
  EXPECT_TRUE(overlap({x.slice(0, 0, 4), x.slice(0, 3, 6)}));
  EXPECT_TRUE(overlap({x, x}, 2));
  EXPECT_TRUE(overlap({matrix(), x, x}, 2));
}

TEST(WrittenTensors, MayLieBesideOthersInOneAllocation) {
  const at::Tensor x = matrix();
  EXPECT_FALSE(overlap({x[0], x[1], x[2]}, 2));
  EXPECT_FALSE(overlap({x.slice(0, 3, 6), x.slice(0, 0, 3)}));
}

TEST(WrittenTensors, ThatAreReadOnlyMayShareAsTheyLike) {
  const at::Tensor y = matrix();
  EXPECT_FALSE(overlap({matrix(), y, y, y.t()}));
  EXPECT_FALSE(overlap({matrix(), y[0].expand({3, 4})}));
}

TEST(WrittenTensors, MayNotOverlapThemselves) {
  EXPECT_TRUE(overlap({at::zeros({4}).expand({6, 4})}));
  EXPECT_TRUE(overlap({at::zeros({8}).unfold(0, 4, 1)}));
  EXPECT_FALSE(overlap({at::zeros({8}).unfold(0, 4, 4)}));
  EXPECT_FALSE(overlap({at::zeros({1}).expand({1, 1})}));
}

TEST(WrittenTensors, WithGapsAreFine) {
  EXPECT_FALSE(overlap({at::zeros({6, 8}).slice(1, 0, 8, 2)}));
  EXPECT_FALSE(overlap({at::zeros({6, 8}).t().slice(0, 2, 5)}));
}

TEST(WrittenTensors, AreFoundAmongManyTensors) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 300; ++i) {
    tensors.push_back(at::zeros({3, 5}));
  }
  EXPECT_FALSE(overlap(tensors, 100));
  tensors[299] = tensors[50].view({15}).slice(0, 14, 15);
  EXPECT_TRUE(overlap(tensors, 100));
  tensors[299] = tensors[150];
  EXPECT_FALSE(overlap(tensors, 100));
}

TEST(WrittenTensors, OfMoreArgumentsThanItHoldsCountAsOverlapping) {
  WrittenTensors set;
  for (std::size_t i = 0; i <= WrittenTensors::kMaxArguments; ++i) {
    set.add(0, 0);
  }
  EXPECT_TRUE(set.overlap({}));
}

}  // namespace
}  // namespace eagercache
