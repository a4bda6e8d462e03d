#pragma once

// How the arguments of a module's call are words of a key.

#include <cstddef>
#include <cstdint>

#include "python_hooks/nn_modules/arguments.h"

namespace eagercache {

// First word of every value. The encoding is prefix-free value by value, so that two different
// argument lists never give the same words.
enum class Tag : std::uint8_t {
  kNone = 1,
  kFalse,
  kTrue,
  kInt,     // one word
  kFloat,   // one word: the double's bits
  kString,  // length in the header, bytes packed
  kTuple,   // count in the header
  kList,
  kDict,     // count in the header; a string and a value each
  kKeyword,  // length in the header, bytes packed; the value follows
  kTensor,   // dtype, rank and flags (aligned, parameter, marked) in the header; sizes, strides
  kEnd,      // after the last one
  kObject,   // count in the header; the class's name, and a string and a value for each attribute
  kScalarType,  // in the header
  kDevice,      // type and index in the header
  kClass,       // its name follows
  kSame,        // after a tensor: which one of those before it is
  kCount,       // an integer of an object, 0 and above: one word
  kMember,      // of an enum: its name follows
};

constexpr Word header(Tag tag, Word payload = 0) noexcept {
  return static_cast<Word>(tag) | (payload << 8);
}

// Words behind the header of a text.
inline std::size_t words_of_text(Word head) noexcept {
  return static_cast<std::size_t>(((head >> 8) + sizeof(Word) - 1) / sizeof(Word));
}

}  // namespace eagercache
