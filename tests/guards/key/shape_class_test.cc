#include "guards/key/shape_class.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/guards/calls.h"

namespace eagercache {
namespace {

using testing::make_bool;
using testing::make_float;
using testing::make_int;
using testing::make_list;
using testing::make_none;
using testing::make_scalar;
using testing::make_tensor;

using Sizes = std::vector<std::int64_t>;

std::vector<Word> key(std::vector<DecodedArgument> arguments, std::uint16_t threads = 2) {
  DecodedCall call;
  call.state.num_threads = threads;
  call.arguments = std::move(arguments);
  KeyBuffer buffer;
  EXPECT_TRUE(encode_call(call, &buffer));
  return {buffer.words().begin(), buffer.words().end()};
}

DecodedArgument tensor(Sizes sizes, Sizes strides, std::uint8_t dtype = 6) {
  TensorTraits traits;
  traits.dtype = dtype;
  return make_tensor(traits, std::move(sizes), std::move(strides));
}

DecodedArgument dense(Sizes sizes) {
  Sizes strides(sizes.size());
  std::int64_t step = 1;
  for (std::size_t i = sizes.size(); i-- > 0; step *= sizes[i]) strides[i] = step;
  return tensor(std::move(sizes), std::move(strides));
}

DecodedArgument integers(const Sizes& values) {
  return make_scalar(ArgumentKind::kIntList, {values.begin(), values.end()});
}

// The class words; empty where there is no class.
std::vector<Word> class_of(const std::vector<Word>& words) {
  std::vector<Word> out(words.size());
  return class_words(words, out) ? out : std::vector<Word>{};
}

bool same_class(const std::vector<Word>& a, const std::vector<Word>& b) {
  EXPECT_FALSE(class_of(a).empty());
  return class_of(a) == class_of(b);
}

using Values = std::array<std::int64_t, ShapePattern::kMaxSymbols>;

bool covers(const ShapePattern& pattern, const std::vector<Word>& words) {
  Values values{};
  return matches(pattern, words, values);
}

TEST(ShapeClass, AListOfTheLastSizesVariesWithThemHoweverSmall) {
  const auto normalized = [](std::int64_t rows, std::int64_t columns) {
    return key({dense({rows, columns}), integers({columns})});
  };
  EXPECT_TRUE(same_class(normalized(3, 5), normalized(7, 300)));
  EXPECT_FALSE(same_class(normalized(3, 5), key({dense({3, 5}), integers({0})})));
  EXPECT_FALSE(same_class(normalized(3, 5), normalized(3, 1)));
  const auto pattern = generalize(normalized(3, 5), normalized(7, 300));
  ASSERT_TRUE(pattern);
  EXPECT_EQ(pattern->ties.size(), 1U);
  EXPECT_TRUE(pattern->is_sound());
}

TEST(ShapeClass, HoldsCallsThatDifferInSizes) {
  EXPECT_TRUE(same_class(key({dense({8, 12})}), key({dense({64, 5})})));
  EXPECT_TRUE(same_class(key({tensor({8, 12}, {1, 8})}), key({tensor({3, 7}, {1, 3})})));
  EXPECT_TRUE(same_class(key({tensor({8, 12}, {0, 1})}), key({tensor({3, 7}, {0, 1})})));
}

TEST(ShapeClass, TellsApartWhatIsNotASize) {
  const auto one = key({dense({8, 12}), make_int(1), make_bool(true)});
  EXPECT_FALSE(same_class(one, key({dense({8, 12}), make_int(2), make_bool(true)})));
  EXPECT_FALSE(same_class(one, key({dense({8, 12}), make_int(1), make_bool(false)})));
  EXPECT_FALSE(same_class(one, key({dense({8, 12}), make_none(), make_bool(true)})));
  EXPECT_FALSE(same_class(one, key({dense({8, 12}), make_int(1), make_bool(true)}, 1)));
  EXPECT_FALSE(same_class(one, key({dense({8, 12, 2}), make_int(1), make_bool(true)})));
  EXPECT_FALSE(same_class(key({dense({8, 12})}), key({tensor({8, 12}, {12, 1}, 7)})));
  EXPECT_FALSE(same_class(key({dense({8, 12})}), key({tensor({8, 12}, {1, 8})})));
  EXPECT_FALSE(same_class(key({dense({8, 12})}), key({tensor({8, 12}, {0, 1})})));
}

TEST(ShapeClass, ASizeOfOneIsAClassOfItsOwn) {
  EXPECT_FALSE(same_class(key({dense({8, 12})}), key({dense({1, 12})})));
  EXPECT_FALSE(same_class(key({dense({8, 12})}), key({dense({8, 1})})));
  EXPECT_TRUE(class_of(key({dense({1, 1})})).empty());
  EXPECT_TRUE(class_of(key({dense({})})).empty());
}

TEST(ShapeClass, IsForDenseTensorsOnly) {
  EXPECT_TRUE(class_of(key({tensor({8, 12}, {24, 1})})).empty());
  EXPECT_TRUE(class_of(key({tensor({8, 12}, {24, 2})})).empty());
  EXPECT_TRUE(class_of(key({tensor({8, 12}, {1, 1})})).empty());
}

TEST(ShapeClass, StridesOfSizeOneNeedNotBeDense) {
  // A bias [4, N, N] with its heads innermost, and a batch of 1 in front of it.
  const auto bias = [](std::int64_t n) { return key({tensor({1, 4, n, n}, {4, 1, 4 * n, 4})}); };
  EXPECT_TRUE(same_class(bias(5), bias(24)));
  const auto pattern = generalize(bias(5), bias(6));
  ASSERT_TRUE(pattern && pattern->is_sound());
  EXPECT_TRUE(covers(*pattern, bias(24)));
  // The last token of a longer row.
  const auto last = [](std::int64_t n) { return key({tensor({1, 64}, {64 * n, 1})}); };
  EXPECT_TRUE(same_class(last(2), last(9)));
}

TEST(ShapeClass, APlaceOfAStrideOfSizeOneIsWhatItComparesWith) {
  const auto one = [](std::int64_t stride) { return key({tensor({1, 12}, {stride, 1})}); };
  EXPECT_FALSE(same_class(one(1), one(12)));   // the innermost, or as contiguous
  EXPECT_FALSE(same_class(one(12), one(13)));  // past all elements
  EXPECT_TRUE(same_class(one(13), one(100)));
  EXPECT_TRUE(class_of(one(5)).empty());  // between two: other sizes do not say what it is
  EXPECT_TRUE(class_of(one(0)).empty());
  // Of two past all elements the first is the outermost.
  const auto two = [](std::int64_t a, std::int64_t b) {
    return key({tensor({1, 1, 3}, {a, b, 1})});
  };
  EXPECT_TRUE(same_class(two(90, 9), two(40, 20)));
  EXPECT_TRUE(class_of(two(9, 90)).empty());
  EXPECT_TRUE(class_of(two(9, 9)).empty());
}

TEST(ShapePattern, TakesNoSizesWhereStridesPastAllElementsDiffer) {
  const auto token = [](std::int64_t stride) { return key({tensor({1, 1}, {stride, 1})}); };
  EXPECT_TRUE(class_of(token(1)).empty());  // nothing in it varies
  const auto pattern = generalize(token(2), token(3));
  ASSERT_TRUE(pattern.has_value());
  EXPECT_TRUE(pattern->symbols.empty());
  EXPECT_TRUE(pattern->is_sound());
  EXPECT_TRUE(covers(*pattern, token(1000)));
  EXPECT_FALSE(generalize(token(2), token(2)).has_value());
  EXPECT_FALSE(generalize_fully(token(2), token(2)).has_value());
}

TEST(ShapeClass, ClassWordsAreTheKeyOfACall) {
  DecodedCall call;
  EXPECT_TRUE(decode_call(class_of(key({dense({8, 12}), make_float(0.5), make_int(100),
                                        make_list(ArgumentKind::kTensorList, {dense({3, 4})})})),
                          &call));
}

TEST(ShapePattern, TakesTheSizesThatDiffer) {
  const auto call = key({dense({8, 12}), dense({12})});
  const auto pattern = generalize(call, key({dense({9, 12}), dense({12})}));
  ASSERT_TRUE(pattern.has_value());
  EXPECT_EQ(pattern->symbols, (std::vector<ShapePattern::Symbol>{{2, 0, 0}}));
  EXPECT_TRUE(pattern->is_sound());
  EXPECT_TRUE(covers(*pattern, key({dense({100, 12}), dense({12})})));
  EXPECT_FALSE(covers(*pattern, key({dense({100, 13}), dense({13})})));
  const auto fully = generalize_fully(call, key({dense({9, 12}), dense({12})}));
  ASSERT_TRUE(fully.has_value());
  EXPECT_EQ(fully->symbols, (std::vector<ShapePattern::Symbol>{{2, 0, 0}, {3, 0, 1}, {7, 1, 0}}));
  EXPECT_TRUE(covers(*fully, key({dense({100, 13}), dense({13})})));
  Values values{};
  EXPECT_TRUE(matches(*fully, key({dense({100, 13}), dense({14})}), values));
  EXPECT_EQ(values[0], 100);
  EXPECT_EQ(values[1], 13);
  EXPECT_EQ(values[2], 14);  // that two sizes must be equal is for the kernel's guards
}

TEST(ShapePattern, TiesIntegersThatFollowASize) {
  const auto call = key({dense({8, 96}), integers({96})});
  const auto pattern = generalize(call, key({dense({8, 80}), integers({80})}));
  ASSERT_TRUE(pattern.has_value());
  EXPECT_EQ(pattern->ties, (std::vector<ShapePattern::Tie>{{7, 0, 1, 0}}));
  EXPECT_TRUE(pattern->is_sound());
  EXPECT_TRUE(covers(*pattern, key({dense({8, 33}), integers({33})})));
  EXPECT_FALSE(covers(*pattern, key({dense({8, 33}), integers({34})})));
  // Integers that differ and follow nothing.
  EXPECT_FALSE(generalize(call, key({dense({8, 80}), integers({81})})).has_value());
}

TEST(ShapePattern, CountsArgumentsPastLists) {
  const auto list = [](std::int64_t n) {
    return make_list(ArgumentKind::kTensorList, {dense({n, 3}), dense({n, 4})});
  };
  const auto empty = make_list(ArgumentKind::kTensorList, {});
  const auto pattern = generalize(key({list(20), empty, make_none(), make_int(20)}),
                                  key({list(30), empty, make_none(), make_int(30)}));
  ASSERT_TRUE(pattern.has_value());
  ASSERT_EQ(pattern->symbols.size(), 2U);
  EXPECT_EQ(pattern->symbols[1].tensor, 1U);
  ASSERT_EQ(pattern->ties.size(), 1U);
  EXPECT_EQ(pattern->ties[0].argument, 3U);
}

TEST(ShapePattern, NothingButSizesMayDiffer) {
  const auto call = key({dense({8, 12}), make_float(0.5)});
  EXPECT_FALSE(generalize(call, key({dense({9, 12}), make_float(0.25)})).has_value());
  EXPECT_FALSE(generalize(call, call).has_value());
  const auto pattern = generalize(call, key({dense({9, 12}), make_float(0.5)}));
  ASSERT_TRUE(pattern.has_value());
  EXPECT_FALSE(covers(*pattern, key({dense({9, 12}), make_float(0.25)})));
  EXPECT_FALSE(covers(*pattern, key({dense({9, 12})})));
}

TEST(ShapePattern, IsRefusedWhereItsPositionsAreNotItsWords) {
  const auto good =
      generalize(key({dense({8, 96}), integers({96})}), key({dense({9, 80}), integers({80})}));
  ASSERT_TRUE(good.has_value() && good->is_sound());
  const auto broken = [&](auto change) {
    ShapePattern pattern = *good;
    change(pattern);
    return !pattern.is_sound();
  };
  EXPECT_TRUE(broken([](ShapePattern& p) { p.symbols[0].word = 4; }));  // a stride
  EXPECT_TRUE(broken([](ShapePattern& p) { p.symbols[0].word = 1000; }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.symbols[0].tensor = 1; }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.symbols[0].dimension = 1; }));
  EXPECT_TRUE(broken([](ShapePattern& p) { std::swap(p.symbols[0], p.symbols[1]); }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.symbols.clear(); }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.ties[0].symbol = 9; }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.ties[0].symbol = 0; }));  // has another value
  EXPECT_TRUE(broken([](ShapePattern& p) { p.ties[0].word = 2; }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.ties[0].argument = 0; }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.words.pop_back(); }));
  EXPECT_TRUE(broken([](ShapePattern& p) { p.words[1] = 0; }));
}

}  // namespace
}  // namespace eagercache
