#pragma once

// The one place that knows torch's versions. Which of them are built and tested is a table
// (python_hooks/eagercache/base/torch_versions.py). Where the compiler can tell whether a feature
// is there, it is asked, so that a torch that nobody has tried is built right as well.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>

#include <functional>

#if !defined(EAGERCACHE_TORCH_MAJOR) || !defined(EAGERCACHE_TORCH_MINOR)
#error "EAGERCACHE_TORCH_MAJOR and EAGERCACHE_TORCH_MINOR come from cmake/TorchTargets.cmake"
#endif

namespace eagercache::compat {

// Named tensors left torch in 2.13; where they exist, names must propagate and calls step aside.
template <typename Impl>
constexpr bool kImplHasNames = requires(const Impl& impl) {
  impl.has_named_tensor_meta();
};
constexpr bool kHasNamedTensors = kImplHasNames<c10::TensorImpl>;

template <typename Impl>
bool has_names(const Impl& impl) noexcept {
  if constexpr (kImplHasNames<Impl>) {
    return impl.has_named_tensor_meta();
  } else {
    return false;
  }
}

// Tag of std::hash below.
struct KernelLookup {};

}  // namespace eagercache::compat

// OperatorHandle::lookup is public from 2.14 on. Before, the operator's entry is private, but
// every std::hash specialisation is OperatorHandle's friend; this one reads the entry's dispatch
// table.
template <>
struct std::hash<eagercache::compat::KernelLookup> {
  template <typename Handle>
  static const c10::KernelFunction& lookup(const Handle& op, c10::DispatchKeySet keys) {
    if constexpr (requires { op.lookup(keys); }) {
      return op.lookup(keys);
    } else {
      return op.operatorDef_->op.lookup(keys);
    }
  }
};

namespace eagercache::compat {

// The kernel that a call with exactly this backend key reaches now. A reference into the dispatch
// table: copy it before anything registers. Throws c10::NotImplementedError when there is none.
inline const c10::KernelFunction& lookup_kernel(const c10::OperatorHandle& op,
                                                c10::DispatchKey key) {
  return std::hash<KernelLookup>::lookup(op, c10::DispatchKeySet(key));
}

}  // namespace eagercache::compat
