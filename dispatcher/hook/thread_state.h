#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "guards/builder/aside_reason.h"
#include "guards/builder/key_builder.h"

namespace eagercache {

// Thread-local dispatch state under which plain tensors are not what the program means: functorch
// levels, Python modes, functionalization. They are above us in PyTorch's order and exclude
// themselves before a backend kernel runs; one that is still included fell through to us.
inline constexpr c10::DispatchKeySet kForeignState = c10::DispatchKeySet({
    c10::DispatchKey::Python,
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::FuncTorchDynamicLayerBackMode,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchVmapMode,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::Functionalize,
});

// Why no kernel of ours may answer on this thread right now; kNone when one may. `foreign` are the
// dispatch keys that may not be included.
inline AsideReason thread_state_reason(c10::DispatchKeySet foreign = kForeignState) noexcept {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  if (((local.included_ - local.excluded_) & foreign).raw_repr() != 0 &&
      applies(AsideReason::kDispatchState)) [[unlikely]] {
    return AsideReason::kDispatchState;
  }
  if (!floating_point_mode_is_default() && applies(AsideReason::kFloatingPointMode)) [[unlikely]] {
    return AsideReason::kFloatingPointMode;
  }
  return AsideReason::kNone;
}

}  // namespace eagercache
