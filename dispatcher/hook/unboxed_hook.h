#pragma once

// The unboxed form of a hook, for the generated files alone: each instantiates it for some of
// ATen's signatures.

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatcher/hook/unboxed_hooks.h"

namespace eagercache {

// What a signature returns: how many tensors by value, and how the caller gets them.
template <typename Return>
struct UnboxedReturn;

template <>
struct UnboxedReturn<void> {
  static constexpr std::size_t kFresh = 0;
  static constexpr bool kList = false;
};

template <>
struct UnboxedReturn<at::Tensor> {
  static constexpr std::size_t kFresh = 1;
  static constexpr bool kList = false;
};

template <typename... Tensors>
struct UnboxedReturn<std::tuple<Tensors...>> {
  static constexpr bool kReferences = (std::is_same_v<Tensors, at::Tensor&> && ...);
  static_assert(kReferences || (std::is_same_v<Tensors, at::Tensor> && ...));
  static constexpr std::size_t kFresh = kReferences ? 0 : sizeof...(Tensors);
  static constexpr bool kList = false;
};

template <>
struct UnboxedReturn<at::Tensor&> {
  static constexpr std::size_t kFresh = 0;
  static constexpr bool kList = false;
};

template <>
struct UnboxedReturn<std::vector<at::Tensor>> {
  static constexpr std::size_t kFresh = 0;
  static constexpr bool kList = true;
};

// What a boxed caller of any unboxed hook reaches.
class BoxedCalls : public c10::OperatorKernel {
 public:
  explicit BoxedCalls(OperatorHook& hook) : hook_(hook) {}
  void call_boxed(c10::DispatchKeySet keys, torch::jit::Stack* stack) { hook_.call(keys, stack); }

 protected:
  OperatorHook& hook_;  // lives for ever
};

template <typename Signature>
class UnboxedHook;

template <typename Return, typename... Args>
class UnboxedHook<Return(Args...)> final : public BoxedCalls {
  using Made = UnboxedReturn<Return>;

 public:
  static constexpr std::array<UnboxedKind, sizeof...(Args)> kKinds{unboxed_kind<Args>()...};

  static_assert(((unboxed_kind<Args>() != UnboxedKind::kNone) && ...));

  using BoxedCalls::BoxedCalls;

  Return operator()(c10::DispatchKeySet keys, Args... args) {
    const std::array<const void*, sizeof...(Args)> values{std::addressof(args)...};
    std::array<at::Tensor, Made::kFresh> fixed;
    std::vector<at::Tensor> list;
    const Route route =
        hook_.begin_unboxed({kKinds, values.data()}, {fixed, Made::kList ? &list : nullptr});
    if (route == Route::kAnswered) [[likely]] {
      if constexpr (std::is_void_v<Return>) {
        return;
      } else if constexpr (Made::kList) {
        return list;
      } else if constexpr (std::is_same_v<Return, at::Tensor>) {
        return std::move(fixed[0]);
      } else if constexpr (std::is_same_v<Return, at::Tensor&>) {
        return returned(values, 0);
      } else {
        return as_tuple(fixed, values, std::make_index_sequence<std::tuple_size_v<Return>>());
      }
    }
    const InsideIf inside(route != Route::kBoxed);
    const NativeTrial trial(route == Route::kTimed);
    const c10::KernelFunction& kernel =
        route != Route::kBoxed ? hook_.native_kernel() : hook_.boxed_kernel();
    return kernel.template call<Return, Args...>(hook_.op(), keys, std::forward<Args>(args)...);
  }

 private:
  // The very object that return `index` hands back.
  at::Tensor& returned(std::span<const void* const> values, std::size_t index) const {
    return *static_cast<at::Tensor*>(const_cast<void*>(values[hook_.returned_argument(index)]));
  }

  template <std::size_t... kIndices>
  Return as_tuple(std::span<at::Tensor> fixed, std::span<const void* const> values,
                  std::index_sequence<kIndices...> /*indices*/) const {
    if constexpr (Made::kFresh == 0) {
      return Return(returned(values, kIndices)...);
    } else {
      return Return(std::move(fixed[kIndices])...);
    }
  }
};

template <typename Signature>
struct MakeUnboxed;

template <typename Return, typename... Args>
struct MakeUnboxed<Return(Args...)> {
  using Hook = UnboxedHook<Return(Args...)>;
  static c10::KernelFunction make(OperatorHook& hook) {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Hook>(std::make_unique<Hook>(hook));
  }
  static c10::impl::CppSignature signature() {
    return c10::impl::CppSignature::make<Return(Args...)>();
  }
  static constexpr UnboxedMaker kMaker{Hook::kKinds, UnboxedReturn<Return>::kFresh,
                                       UnboxedReturn<Return>::kList, &make, &signature};
};

}  // namespace eagercache

// PyTorch would unbox a boxed call's arguments only for the hook to box them again, in code of its
// own for each signature: a third of what these files take to compile.
template <typename Signature>
struct c10::impl::make_boxed_from_unboxed_functor<eagercache::UnboxedHook<Signature>, false> final {
  static void call(OperatorKernel* functor, const OperatorHandle& /*op*/, DispatchKeySet keys,
                   Stack* stack) {
    static_cast<eagercache::UnboxedHook<Signature>*>(functor)->call_boxed(keys, stack);
  }
};
