#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/sqrt_cpu_dispatch.h>
#include <benchmark/benchmark.h>
#include <torch/library.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "dispatcher/loaded_kernel.h"
#include "dispatcher/operator_hook.h"
#include "dispatcher/runtime.h"

// Price of the boxed hook from C++, on 8 floats. Two operators have the same kernel, PyTorch's own
// sqrt; one of them is hooked. So stock, native through the hook and a hit are measured by turns in
// one process (--benchmark_enable_random_interleaving), though an override cannot be taken away.
// The hit's kernel is a loop of our own behind the interface that compiled kernels have: what it
// shows is the path to a kernel, not a compiled one.
namespace eagercache {
namespace {

constexpr std::int64_t kHitSize = 8;
constexpr std::int64_t kNativeSize = 7;

at::Tensor native_sqrt(const at::Tensor& x) { return at::cpu::sqrt(x); }

TORCH_LIBRARY(eagercache_bench, library) {
  library.def("stock(Tensor x) -> Tensor");
  library.def("hooked(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(eagercache_bench, CPU, library) {
  library.impl("stock", &native_sqrt);
  library.impl("hooked", &native_sqrt);
}

class SqrtKernel final : public LoadedKernel {
 public:
  Outcome run(std::span<const at::Tensor* const> inputs, std::span<at::Tensor> outputs,
              c10::Device /*device*/) noexcept override {
    outputs[0] = at::empty({kHitSize}, at::TensorOptions(at::kFloat));
    const float* const from = inputs[0]->const_data_ptr<float>();
    float* const to = outputs[0].mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < kHitSize; ++i) to[i] = std::sqrt(from[i]);
    return Outcome::kAnswered;
  }
  std::size_t num_inputs() const noexcept override { return 1; }
  std::size_t num_outputs() const noexcept override { return 1; }
};

using Signature = at::Tensor(const at::Tensor&);

const c10::TypedOperatorHandle<Signature>& handle(const char* name) {
  static const auto kStock = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("eagercache_bench::stock", "")
                                 .typed<Signature>();
  static const auto kHooked = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("eagercache_bench::hooked", "")
                                  .typed<Signature>();
  return std::string_view(name) == "stock" ? kStock : kHooked;
}

// Hooks one of the twins: 8 floats have a kernel, 7 are decided for native.
OperatorHook& prepare() {
  static OperatorHook* const kHook = [] {
    Policy policy;
    policy.on_miss = OnMiss::kNative;
    Runtime& runtime = Runtime::instance();
    runtime.set_policy(policy);
    OperatorHook* hook = runtime.register_operator("eagercache_bench::hooked", "", "CPU").value();
    hook->set_active(true);
    runtime.set_answering(true);
    static SqrtKernel kernel;
    const torch::jit::Stack stack{at::ones({kHitSize})};
    CallView view;
    if (hook->read_call(stack, view) != AsideReason::kNone) std::abort();
    hook->table().set_kernel(view.key.words(), hash_words(view.key.words()), &kernel);
    return hook;
  }();
  return *kHook;
}

void run(benchmark::State& state, const char* name, std::int64_t size) {
  at::set_num_threads(1);
  prepare();
  const c10::InferenceMode
      no_autograd;  // a custom operator's fallback for autograd is not the topic
  const at::Tensor x = at::randn({size});
  const auto& op = handle(name);
  for (auto _ : state) benchmark::DoNotOptimize(op.call(x));
}

void BM_Stock(benchmark::State& state) { run(state, "stock", kHitSize); }
void BM_HookToNative(benchmark::State& state) { run(state, "hooked", kNativeSize); }
void BM_Hit(benchmark::State& state) { run(state, "hooked", kHitSize); }
BENCHMARK(BM_Stock);
BENCHMARK(BM_HookToNative);
BENCHMARK(BM_Hit);

}  // namespace
}  // namespace eagercache
