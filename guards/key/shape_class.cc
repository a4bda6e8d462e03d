#include "guards/key/shape_class.h"

#include <algorithm>
#include <array>
#include <limits>

#include "guards/key/key_items.h"

namespace eagercache {
namespace {

constexpr std::size_t kMaxRank = 16;
// What stands for a size that varies, in class words: any but 1.
constexpr Word kAnySize = 2;
constexpr Word kAnyInteger = static_cast<Word>(kSmallInteger) + 1;
constexpr Word kRepeated = kMaxRank + 1;  // the place of a stride of 0
// The place of a stride of a dimension of size 1: this and which of the steps it equals.
constexpr Word kAtStep = 2 * kMaxRank;
constexpr Word kBeyond = 4 * kMaxRank;  // or past all of the tensor's elements

// What strides a dense tensor has, from the inside out, and last the number of its elements.
struct Steps {
  std::array<Word, kMaxRank + 1> values;  // uninitialised: on the path of a new key
  std::size_t count = 0;
};

// Writes the place of each stride of a dimension of more than one element, 1 for the largest. False
// unless the tensor is dense when these dimensions are put in that order.
bool place_strides(std::span<const Word> sizes, std::span<const Word> strides,
                   std::span<Word> places, Steps* steps) noexcept {
  std::array<std::size_t, kMaxRank> order{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    if (strides[i] == 0) {
      places[i] = kRepeated;
      continue;
    }
    std::size_t place = count++;
    for (; place > 0 && strides[order[place - 1]] < strides[i]; --place) {
      order[place] = order[place - 1];
    }
    order[place] = i;
  }
  Word expected = steps->values[0] = 1;
  for (std::size_t place = count; place-- > 0;) {
    const std::size_t dimension = order[place];
    if (strides[dimension] != expected) return false;
    if (__builtin_mul_overflow(expected, sizes[dimension], &expected)) return false;
    places[dimension] = place + 1;
    steps->values[count - place] = expected;
  }
  steps->count = count + 1;
  return true;
}

// The same for the dimensions of size 1. Their strides address nothing, but native may copy them
// to its output, and compares them with the others where it looks for a memory format. So a place
// says how one compares with all others; what is between two steps has none. Sets `beyond` when a
// stride is past them all, where sizes do not say what it is.
bool place_unit_strides(std::span<const Word> sizes, std::span<const Word> strides,
                        const Steps& steps, std::span<Word> places, bool* beyond) noexcept {
  const std::span<const Word> known(steps.values.data(), steps.count);
  Word outer = std::numeric_limits<Word>::max();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) continue;
    if (const auto at = std::ranges::find(known, strides[i]); at != known.end()) {
      places[i] = kAtStep + static_cast<Word>(at - known.begin());
    } else if (strides[i] > known.back() && strides[i] < outer) {
      // Of several the first is the outermost, as in a part of a larger tensor.
      places[i] = kBeyond;
      outer = strides[i];
      *beyond = true;
    } else {
      return false;
    }
  }
  return true;
}

bool is_small(Word word) noexcept {
  const auto value = static_cast<std::int64_t>(word);
  return value >= -kSmallInteger && value <= kSmallInteger;
}

// Whether a list of integers is the last sizes of a tensor, as a normalized shape is: then they
// vary with it, however small they are.
bool ends(std::span<const Word> sizes, std::span<const Word> list) noexcept {
  return list.size() <= sizes.size() && std::ranges::equal(list, sizes.last(list.size()));
}

// The class words of one item, header included. Sets `varies` when a size or a stride may vary.
// `first` are the sizes of the call's first tensor.
bool write_item(const Item& item, std::span<const Word> words, std::span<const Word> first,
                std::span<Word> out, bool* varies) noexcept {
  const std::span<const Word> payload = words.subspan(item.at + 1, item.payload);
  const std::span<Word> target = out.subspan(item.at + 1, item.payload);
  out[item.at] = words[item.at];
  switch (item.kind) {
    case ArgumentKind::kTensor: {
      const std::size_t rank = payload.size() / 2;
      if (rank > kMaxRank) return false;
      for (std::size_t i = 0; i < rank; ++i) {
        target[i] = payload[i] == 1 ? 1 : kAnySize;
        *varies = *varies || payload[i] != 1;
      }
      const std::span<const Word> sizes = payload.first(rank);
      const std::span<const Word> strides = payload.last(rank);
      Steps steps;
      return place_strides(sizes, strides, target.last(rank), &steps) &&
             place_unit_strides(sizes, strides, steps, target.last(rank), varies);
    }
    case ArgumentKind::kInt:
    case ArgumentKind::kIntList: {
      const bool follow = item.kind == ArgumentKind::kIntList && ends(first, payload);
      std::transform(payload.begin(), payload.end(), target.begin(), [follow](Word word) {
        return is_small(word) && (!follow || word == 1) ? word : kAnyInteger;
      });
      return true;
    }
    case ArgumentKind::kFloat:
    case ArgumentKind::kFloatList:
    case ArgumentKind::kComplex:
      std::fill(target.begin(), target.end(), Word{0});
      return true;
    default:
      std::copy(payload.begin(), payload.end(), target.begin());
      return true;
  }
}

// What a word of a key is to a pattern.
enum class Role : std::uint8_t { kOther, kSize, kStride, kInteger };

struct Position {
  Role role = Role::kOther;
  std::uint32_t owner = 0;    // the tensor's or the argument's number
  std::uint32_t element = 0;  // dimension, or index in a list
};

// The role of every word. Empty when the words are no key.
std::vector<Position> positions(std::span<const Word> words) {
  std::vector<Position> all(words.size());
  Items items(words);
  Item item;
  std::uint32_t tensor = 0;
  std::uint32_t argument = 0;
  std::size_t elements = 0;  // of the list that the walk is in
  while (items.next(&item)) {
    for (std::size_t i = 0; i < item.payload; ++i) {
      Position& position = all[item.at + 1 + i];
      if (item.kind == ArgumentKind::kTensor) {
        const std::size_t rank = item.payload / 2;
        position = {i < rank ? Role::kSize : Role::kStride, tensor,
                    static_cast<std::uint32_t>(i < rank ? i : i - rank)};
      } else if ((item.kind == ArgumentKind::kInt && elements == 0) ||
                 item.kind == ArgumentKind::kIntList) {
        position = {Role::kInteger, argument, static_cast<std::uint32_t>(i)};
      }
    }
    tensor += item.kind == ArgumentKind::kTensor ? 1 : 0;
    if (item.kind == ArgumentKind::kTensorList || item.kind == ArgumentKind::kScalarList) {
      elements = read_field<KeyField::kCountedCount>(words[item.at]);
      argument += elements == 0 ? 1 : 0;
    } else if (elements == 0 || --elements == 0) {
      ++argument;
    }
  }
  return items.sound() ? all : std::vector<Position>{};
}

std::optional<ShapePattern> generalize_sizes(std::span<const Word> call,
                                             std::span<const Word> other, bool fully) {
  const std::vector<Position> all = positions(call);
  if (all.empty() || call.size() != other.size()) return std::nullopt;
  ShapePattern pattern;
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    if (all[i].role == Role::kSize && call[i] != 1 && (fully || call[i] != other[i])) {
      pattern.symbols.push_back({i, all[i].owner, all[i].element});
    }
  }
  if (pattern.symbols.size() > ShapePattern::kMaxSymbols ||
      (pattern.symbols.empty() && std::ranges::equal(call, other))) {
    return std::nullopt;
  }
  for (std::uint32_t i = 0; i < all.size(); ++i) {
    if (call[i] == other[i] || all[i].role == Role::kSize || all[i].role == Role::kStride) continue;
    if (all[i].role != Role::kInteger) return std::nullopt;
    const auto follows = [&](const ShapePattern::Symbol& symbol) {
      return call[symbol.word] == call[i] && other[symbol.word] == other[i];
    };
    const auto found = std::find_if(pattern.symbols.begin(), pattern.symbols.end(), follows);
    if (found == pattern.symbols.end()) return std::nullopt;
    pattern.ties.push_back({i, static_cast<std::uint32_t>(found - pattern.symbols.begin()),
                            all[i].owner, all[i].element});
  }
  pattern.words.assign(call.begin(), call.end());
  return pattern;
}

}  // namespace

bool class_words(std::span<const Word> words, std::span<Word> out) noexcept {
  if (words.empty() || out.size() < words.size()) return false;
  out[0] = words[0];
  bool varies = false;
  std::span<const Word> first;
  Items items(words);
  Item item;
  while (items.next(&item)) {
    if (item.kind == ArgumentKind::kTensor && first.empty()) {
      first = words.subspan(item.at + 1, item.payload / 2);
    }
    if (!write_item(item, words, first, out, &varies)) return false;
  }
  return items.sound() && varies;
}

std::optional<ShapePattern> generalize(std::span<const Word> call, std::span<const Word> other) {
  return generalize_sizes(call, other, false);
}

std::optional<ShapePattern> generalize_fully(std::span<const Word> call,
                                             std::span<const Word> other) {
  return generalize_sizes(call, other, true);
}

bool ShapePattern::is_sound() const {
  std::vector<Word> own(words.size());
  if (!class_words(words, own) || symbols.size() > kMaxSymbols) return false;
  const std::vector<Position> all = positions(words);
  const auto is_open = [&](const Position& at) {
    return at.role == Role::kStride && own[static_cast<std::size_t>(&at - all.data())] == kBeyond;
  };
  if (symbols.empty() && std::ranges::none_of(all, is_open)) return false;
  std::size_t next = 1;
  for (const Symbol& symbol : symbols) {
    if (symbol.word < next || symbol.word >= all.size() || words[symbol.word] == 1) return false;
    const Position& at = all[symbol.word];
    if (at.role != Role::kSize || at.owner != symbol.tensor || at.element != symbol.dimension) {
      return false;
    }
    next = symbol.word + 1;
  }
  next = 1;
  for (const Tie& tie : ties) {
    if (tie.word < next || tie.word >= all.size() || tie.symbol >= symbols.size()) return false;
    const Position& at = all[tie.word];
    if (at.role != Role::kInteger || at.owner != tie.argument || at.element != tie.element ||
        words[tie.word] != words[symbols[tie.symbol].word]) {
      return false;
    }
    next = tie.word + 1;
  }
  return true;
}

bool matches(const ShapePattern& pattern, std::span<const Word> words,
             std::span<std::int64_t, ShapePattern::kMaxSymbols> values) noexcept {
  if (words.size() != pattern.words.size() || words[0] != pattern.words[0]) return false;
  for (std::size_t i = 0; i < pattern.symbols.size(); ++i) {
    values[i] = static_cast<std::int64_t>(words[pattern.symbols[i].word]);
  }
  auto symbol = pattern.symbols.begin();
  auto tie = pattern.ties.begin();
  Items items(words);
  Item item;
  while (items.next(&item)) {
    // The layout is the class's, so that strides follow from the sizes.
    const std::size_t compared =
        item.kind == ArgumentKind::kTensor ? item.payload / 2 : item.payload;
    for (std::size_t i = item.at; i <= item.at + compared; ++i) {
      if (symbol != pattern.symbols.end() && symbol->word == i) {
        ++symbol;
      } else if (tie != pattern.ties.end() && tie->word == i) {
        if (static_cast<std::int64_t>(words[i]) != values[tie->symbol]) return false;
        ++tie;
      } else if (words[i] != pattern.words[i]) {
        return false;
      }
    }
  }
  return items.sound();
}

}  // namespace eagercache
