#pragma once

// Functions of their arguments alone; any thread. Who has kernels for which class is known above
// (dispatcher/classes).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "guards/key/call_key.h"

// Shape classes: calls whose keys differ in sizes only, which one kernel with symbolic sizes can
// answer.
//
// Two calls are of one class when their class words are equal: the key's words with every size but
// 1 replaced, every stride replaced by its place in the order of the strides, and numbers that are
// no flags (integers beyond kSmallInteger, lists of the last sizes of the first tensor,
// floating-point ones) replaced. A size of 1 broadcasts and is a class of its own. Tensors whose
// strides are not those of a dense tensor with permuted dimensions (0 for repeated ones) have no
// class.
//
// The stride of a dimension of size 1 addresses nothing, and density does not ask for it. But
// native may copy it, or compare it with others: its place says which stride of the dense tensor it
// equals, or that it is past all elements. Where it is past them (a part of a larger tensor) the
// sizes do not say what it is: calls of a class may differ in it.
//
// A pattern says which calls of a class one kernel was made for: the sizes that it takes as
// arguments (symbols), integers that follow them (ties), and the words that all other positions
// must equal. What a kernel demands of its symbols beyond that is for its own guards.
namespace eagercache {

// Integers up to this magnitude are dimensions, counts and flags: they tell classes apart.
inline constexpr std::int64_t kSmallInteger = 8;

// Writes the class words of a key to `out`, which has room for words.size() of them. They are
// themselves the encoding of a call, of one member. False when the call has no class: nothing in it
// varies, a layout is not understood, or the words are no key. Allocates nothing.
bool class_words(std::span<const Word> words, std::span<Word> out) noexcept;

// A class of calls as a kernel with symbolic sizes sees it: a member's words, and which of them are
// arguments.
struct ShapePattern {
  static constexpr std::size_t kMaxSymbols = 24;

  // A size that is an argument of the kernel.
  struct Symbol {
    std::uint32_t word = 0;    // where in the key
    std::uint32_t tensor = 0;  // which of the call's tensors, in the order of the kernel's inputs
    std::uint32_t dimension = 0;  // of that tensor
    friend bool operator==(const Symbol&, const Symbol&) = default;
  };
  // An integer argument, or an element of one, that always equals a symbol.
  struct Tie {
    std::uint32_t word = 0;
    std::uint32_t symbol = 0;
    std::uint32_t argument = 0;  // of the schema
    std::uint32_t element = 0;   // of a list; 0 otherwise
    friend bool operator==(const Tie&, const Tie&) = default;
  };

  std::vector<Word> words;  // of the call that the pattern was made of
  std::vector<Symbol> symbols;
  std::vector<Tie> ties;

  // Whether the positions are those of `words`' own sizes and integers, in ascending order. What
  // comes out of a file is checked by this before it is matched.
  bool is_sound() const;
};

// The pattern of two calls of one class: a symbol for each size in which they differ, none where
// they differ in strides past all elements alone. Integers that differ must equal one and the same
// symbol in both. Nothing when the calls differ in anything else, or in nothing.
std::optional<ShapePattern> generalize(std::span<const Word> call, std::span<const Word> other);

// The same with a symbol for each size that is not 1, and ties as `call` and `other` suggest.
std::optional<ShapePattern> generalize_fully(std::span<const Word> call,
                                             std::span<const Word> other);

// Whether the pattern covers a call whose class words equal those of pattern.words. Writes the
// symbols' values, kMaxSymbols at most. The pattern must be sound. Allocates nothing.
bool matches(const ShapePattern& pattern, std::span<const Word> words,
             std::span<std::int64_t, ShapePattern::kMaxSymbols> values) noexcept;

}  // namespace eagercache
