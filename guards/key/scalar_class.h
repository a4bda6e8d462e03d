#pragma once

// Functions of their arguments alone; any thread. Who has kernels for which class is known above
// (dispatcher/classes).

#include <cstddef>
#include <span>

#include "guards/key/call_key.h"

// Scalar classes: calls whose keys differ in floating-point numbers only (a learning rate, a
// momentum), which one kernel that takes these numbers as arguments can answer.
//
// Two calls are of one class when their class words are equal: the key's words with every ordinary
// number replaced by what stands for numbers of its sign and on its side of 1/2. Numbers that
// operators and compilers treat specially are not ordinary and stay as they are: zeros, infinities,
// NaN, multiples of 1/2 up to 16, magnitudes near the ends of the narrowest dtype of the call.
//
// Only calls whose tensors are real floating-point ones, or masks, have a class; those with a dtype
// among their arguments have none.
namespace eagercache {

inline constexpr std::size_t kMaxScalars = 512;

// Writes the class words of a key to `out`, which has room for words.size() of them, and the
// numbers that they leave out, in order, to `numbers`. They are themselves the encoding of a call,
// and the class words of themselves. Returns how many numbers there are: 0 when the call has no
// class, or the words are no key. Allocates nothing.
std::size_t scalar_class(std::span<const Word> words, std::span<Word> out,
                         std::span<double, kMaxScalars> numbers) noexcept;

}  // namespace eagercache
