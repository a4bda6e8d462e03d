#include <cstddef>
#include <span>
#include <vector>

#include "python_hooks/nn_modules/argument_words.h"
#include "python_hooks/nn_modules/arguments.h"

namespace eagercache {

std::vector<SizedPlace> sized_places(std::span<const Word> words) {
  std::vector<SizedPlace> places;
  std::size_t at = 0;
  while (at < words.size()) {
    switch (static_cast<Tag>(words[at] & 0xFF)) {
      case Tag::kNone:
      case Tag::kFalse:
      case Tag::kTrue:
      case Tag::kTuple:
      case Tag::kList:
      case Tag::kDict:
      case Tag::kObject:
      case Tag::kScalarType:
      case Tag::kDevice:
        at += 1;
        break;
      case Tag::kSame:
        if (places.empty()) {
          return {};
        }
        places.back().is_same = true;
        at += 1;
        break;
      case Tag::kInt:
      case Tag::kFloat:
        at += 2;
        break;
      case Tag::kString:
      case Tag::kKeyword:
      case Tag::kClass:
      case Tag::kMember:
        at += 1 + words_of_text(words[at]);
        break;
      case Tag::kTensor:
        places.push_back({at, static_cast<std::size_t>((words[at] >> 32) & 0xFFFF)});
        at = places.back().end();
        break;
      case Tag::kCount:
        places.push_back({.word = at, .rank = 1, .is_count = true});
        at = places.back().end();
        break;
      case Tag::kEnd:
        return places;
      default:
        return {};
    }
  }
  return {};
}

}  // namespace eagercache
