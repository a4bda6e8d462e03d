#pragma once

// A tensor's version counter tells autograd that a tensor which it saved was written since. Whoever
// answers in native's place has to move the counters that native moves, and no others. On the
// thread of the call.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <span>

#include "dispatcher/operators/operator_effects.h"

namespace eagercache {

inline void move_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// Moves the counters of what a call has made, as native's own filling in place does.
inline void move_fresh_versions(const OperatorEffects& effects,
                                std::span<const at::Tensor> outputs) {
  if (!effects.moves_fresh ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) [[likely]] {
    return;
  }
  for (const at::Tensor& output : outputs) {
    move_version(output);
  }
}

// Calls `move(index)` for each argument whose version counter a call moves: as the in-place
// operators do that native is made of, none where the caller has excluded that key.
template <typename Move>
void for_each_moved_version(const OperatorEffects& effects, Move move) {
  if (effects.writes.empty() ||
      c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) {
    return;
  }
  for (const WrittenArgument& write : effects.writes) {
    if (write.moves_version) {
      move(write.index);
    }
  }
}

}  // namespace eagercache
