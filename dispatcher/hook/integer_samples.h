#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace eagercache {

// What an integer tensor of a call held: indices, class labels, lengths. It goes to the compile
// service with the call's description, since made-up numbers would be out of range.
struct IntegerSample {
  std::size_t tensor = 0;            // its place among the call's tensors, as in TensorArguments
  bool whole = false;                // all elements in row-major order; else some, evenly spaced
  std::vector<std::int64_t> values;  // never empty
};

// At most so many elements of a call are read, and so many tensors: 8 KB and some microseconds.
constexpr std::size_t kMostIntegers = 1024;
constexpr std::size_t kMostIntegerTensors = 8;
// Of a tensor that has more elements than are left of those, so many are read: each may be a cache
// miss.
constexpr std::size_t kSampledIntegers = 128;

// The integer tensors among `tensors` (int8 to int64 and uint8; no booleans, no numbers of Python).
// Reads the memory of plain strided tensors on CPU and of no others, on the calling thread, which
// is about to hand that memory to native. Empty without memory, too.
std::vector<IntegerSample> sample_integers(std::span<const at::Tensor* const> tensors) noexcept;

}  // namespace eagercache
