#pragma once

// Private to the classes of calls. An object reads words that its caller owns and must keep.

#include <cstddef>
#include <span>

#include "guards/key/call_key.h"
#include "guards/key/key_fields.h"

// A walk over the words of a key, for the classes of calls (shape_class.cc, scalar_class.cc).
namespace eagercache {

// One item of a key: a header and its payload. Lists of tensors and of scalars are a header without
// payload, followed by their elements.
struct Item {
  ArgumentKind kind = ArgumentKind::kNone;
  std::size_t at = 0;  // of the header
  std::size_t payload = 0;
};

// Walks over the items of a key, whose first word is the state.
class Items {
 public:
  explicit Items(std::span<const Word> words) noexcept : words_(words) {}

  bool next(Item* item) noexcept {
    if (next_ >= words_.size()) return false;
    const Word header = words_[next_];
    item->kind = static_cast<ArgumentKind>(read_field<KeyField::kPlainKind>(header));
    item->at = next_;
    item->payload = payload(item->kind, header);
    if (item->payload > words_.size() - next_ - 1) {
      sound_ = false;
      return false;
    }
    next_ += 1 + item->payload;
    return true;
  }
  // After next() gave false: whether that was the end.
  bool sound() const noexcept { return sound_; }

 private:
  std::size_t payload(ArgumentKind kind, Word header) noexcept {
    const std::size_t count = read_field<KeyField::kCountedCount>(header);
    switch (kind) {
      case ArgumentKind::kNone:
      case ArgumentKind::kUndefinedTensor:
      case ArgumentKind::kTensorList:
      case ArgumentKind::kScalarList:
        return 0;
      case ArgumentKind::kTensor:
        return 2 * read_field<KeyField::kTensorRank>(header);
      case ArgumentKind::kInt:
      case ArgumentKind::kFloat:
      case ArgumentKind::kBool:
      case ArgumentKind::kScalarType:
      case ArgumentKind::kLayout:
      case ArgumentKind::kMemoryFormat:
      case ArgumentKind::kDevice:
        return 1;
      case ArgumentKind::kComplex:
        return 2;
      case ArgumentKind::kString:
        return count / sizeof(Word) + (count % sizeof(Word) != 0);
      case ArgumentKind::kIntList:
      case ArgumentKind::kFloatList:
      case ArgumentKind::kBoolList:
        return count;
    }
    sound_ = false;
    return 0;
  }

  std::span<const Word> words_;
  std::size_t next_ = 1;
  bool sound_ = true;
};

}  // namespace eagercache
