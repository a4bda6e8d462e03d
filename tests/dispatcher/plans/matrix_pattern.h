#pragma once

#include "guards/key/shape_class.h"

namespace eagercache {

// The pattern of calls on a float32 matrix of 8x12 on two threads, both sizes open.
inline ShapePattern matrix_pattern() {
  KeyBuffer key;
  GlobalState state;
  state.num_threads = 2;
  key.put_state(state);
  TensorTraits traits;
  traits.dtype = 6;
  traits.dim = 2;
  const std::int64_t sizes[] = {8, 12};
  const std::int64_t strides[] = {12, 1};
  key.put_tensor(traits, sizes, strides);
  ShapePattern pattern;
  pattern.words.assign(key.words().begin(), key.words().end());
  pattern.symbols = {{2, 0, 0}, {3, 0, 1}};
  return pattern;
}

}  // namespace eagercache
