#include "dispatcher/classes/shape_classes.h"

#include <gtest/gtest.h>

#include "tests/guards/calls.h"

namespace eagercache {
namespace {

using testing::make_tensor;

std::vector<Word> key_of_rows(std::int64_t rows) {
  DecodedCall call;
  call.arguments = {make_tensor({}, {rows, 8}, {8, 1})};
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call(call, &buffer));
  return {buffer.words().begin(), buffer.words().end()};
}

TEST(ShapeClasses, EachFurtherKeyBesideAClassThatLostNeedsTwiceTheCalls) {
  ShapeClasses classes;
  classes.close(key_of_rows(2), /*failed=*/true);
  constexpr std::uint64_t kEnough = 16;
  std::uint64_t needed = kEnough;
  for (std::int64_t rows = 3; rows < 12; ++rows, needed *= 2) {
    EXPECT_FALSE(classes.lets_alone(key_of_rows(rows), needed - 1, kEnough)) << rows;
    EXPECT_TRUE(classes.lets_alone(key_of_rows(rows), needed, kEnough)) << rows;
  }
  classes.clear();
  classes.close(key_of_rows(2), /*failed=*/true);
  EXPECT_TRUE(classes.lets_alone(key_of_rows(3), kEnough, kEnough));
}

TEST(ShapeClasses, AKeyWithoutAClassIsLetAlone) {
  ShapeClasses classes;
  EXPECT_FALSE(classes.lets_alone(key_of_rows(2), 15, 16));
  EXPECT_TRUE(classes.lets_alone(key_of_rows(2), 16, 16));
  EXPECT_TRUE(classes.lets_alone(key_of_rows(3), 16, 16));
}

}  // namespace
}  // namespace eagercache
