#include "guards/key/scalar_class.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "guards/base/left_out.h"
#include "guards/key/key_items.h"

namespace eagercache {
namespace {

// Numbers of c10::ScalarType, which this layer does not know; part of the persistent key.
constexpr Word kHalf = 5;
constexpr Word kFloat = 6;
constexpr Word kDouble = 7;
constexpr Word kBool = 11;
constexpr Word kBFloat16 = 15;

// Specialisations are by such numbers: exponents, slopes, factors that change nothing.
constexpr double kLargestHalves = 16.0;

// Between which magnitudes a number is ordinary.
struct Magnitudes {
  double smallest;
  double largest;
};
// Far enough from the ends of float's and of half's range that native converts them without a
// complaint and without losing digits.
constexpr Magnitudes kWide{0x1p-100, 0x1p100};
constexpr Magnitudes kOfHalf{0x1p-14, 0x1p15};

bool is_ordinary(double value, const Magnitudes& range) noexcept {
  const double magnitude = std::fabs(value);  // every comparison with NaN is false
  if (!(magnitude >= range.smallest && magnitude <= range.largest)) return false;
  return magnitude > kLargestHalves || 2 * magnitude != std::floor(2 * magnitude);
}

// What stands for the numbers of its sign on its side of 1/2; itself an ordinary number.
Word representative(double value) noexcept {
  const double magnitude = std::fabs(value) < 0.5 ? 1.0 / 3 : 4.0 / 3;
  return std::bit_cast<Word>(std::copysign(magnitude, value));
}

// The range of a call's ordinary numbers; nothing to say (largest of 0) where it has no class.
Magnitudes range_of(std::span<const Word> words) noexcept {
  constexpr Magnitudes kNone{1, 0};
  Magnitudes range = kWide;
  bool floating = false;
  Items items(words);
  Item item;
  while (items.next(&item)) {
    if (item.kind == ArgumentKind::kScalarType) return kNone;
    if (item.kind != ArgumentKind::kTensor) continue;
    switch (read_field<KeyField::kTensorDtype>(words[item.at])) {
      case kHalf:
        range = kOfHalf;
        [[fallthrough]];
      case kFloat:
      case kDouble:
      case kBFloat16:
        floating = true;
        break;
      case kBool:
        break;
      default:
        return kNone;
    }
  }
  return items.sound() && floating ? range : kNone;
}

}  // namespace

std::size_t scalar_class(std::span<const Word> words, std::span<Word> out,
                         std::span<double, kMaxScalars> numbers) noexcept {
  if (words.empty() || out.size() < words.size()) return 0;
  const Magnitudes range = range_of(words);
  if (range.largest == 0) return 0;
  std::copy(words.begin(), words.end(), out.begin());
  std::size_t count = 0;
  Items items(words);
  Item item;
  while (items.next(&item)) {
    if (item.kind != ArgumentKind::kFloat) continue;
    const auto value = std::bit_cast<double>(words[item.at + 1]);
    if (!is_ordinary(value, range) && !left_out("check", "ordinary_number")) continue;
    if (count == kMaxScalars) return 0;
    numbers[count++] = value;
    out[item.at + 1] = representative(value);
  }
  return count;
}

}  // namespace eagercache
