#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <memory>

namespace eagercache {

// Makes `target.call(keys, stack)` a boxed kernel. `target` lives for ever.
template <typename Target>
c10::KernelFunction make_boxed(Target& target) {
  class Functor final : public c10::OperatorKernel {
   public:
    explicit Functor(Target& target) : target_(target) {}
    void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
      target_.call(keys, stack);
    }

   private:
    Target& target_;
  };
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Functor>(target));
}

}  // namespace eagercache
