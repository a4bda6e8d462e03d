#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dispatcher/loaded_kernel.h"
#include "dispatcher/operator_hook.h"
#include "dispatcher/output_allocation.h"
#include "dispatcher/runtime.h"

// What a call of ATen's own operators costs from C++ in its three forms. An override cannot be
// taken away, so a process measures one phase, EAGERCACHE_BENCH_PHASE, and run.py runs both by
// turns:
//   stock   nothing is hooked
//   hooked  the operators are hooked: "native" calls are decided for native, "hit" calls are
//           answered by a kernel that allocates its outputs and computes nothing, "off" calls
//           find the hooks disabled.
// Matrix products are never hooked, so that none is here. Names are FORM/OPERATOR/ELEMENTS/TENSORS,
// the last "inference" or "plain" (tensors that autograd looks at).
namespace eagercache {
namespace {

// Answers with uninitialised tensors like the ones that native gave.
class AllocatingKernel final : public LoadedKernel {
 public:
  AllocatingKernel(std::size_t num_inputs, const std::vector<at::Tensor>& natives)
      : num_inputs_(num_inputs) {
    for (const at::Tensor& native : natives) {
      specs_.emplace_back(native.scalar_type(), native.sizes().vec(), native.strides().vec());
    }
  }
  Outcome run(std::span<const at::Tensor* const> /*inputs*/, std::span<at::Tensor> outputs,
              c10::Device /*device*/) noexcept override {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      outputs[i] = specs_[i].allocate();
    }
    return Outcome::kAnswered;
  }
  std::size_t num_inputs() const noexcept override { return num_inputs_; }
  std::size_t num_outputs() const noexcept override { return specs_.size(); }

 private:
  const std::size_t num_inputs_;
  std::vector<OutputSpec> specs_;
};

struct Case {
  const char* op;
  const char* overload;
  std::vector<c10::IValue> boxed;  // the call's arguments
  std::size_t num_tensors;         // among them
  bool writes;                     // no output of its own
  std::function<void()> call;
};

Case make_case(std::string_view name, std::int64_t n) {
  const at::Tensor x = at::randn({n});
  const at::Tensor y = at::randn({n});
  if (name == "abs") {
    return {"aten::abs", "", {x}, 1, false, [x] { benchmark::DoNotOptimize(at::abs(x)); }};
  }
  if (name == "add") {
    return {"aten::add", "Tensor", {x, y, 1},
            2,           false,    [x, y] { benchmark::DoNotOptimize(at::add(x, y)); }};
  }
  if (name == "add_") {
    return {"aten::add_", "Tensor", {x, y, 1}, 2, true, [x, y]() mutable { x.add_(y); }};
  }
  if (name == "add_out") {
    at::Tensor out = at::empty({n});
    return {"aten::add", "out", {x, y, 1, out},
            3,           true,  [x, y, out]() mutable { at::add_out(out, x, y); }};
  }
  if (name == "clamp") {
    return {"aten::clamp",  "",
            {x, -1.0, 1.0}, 1,
            false,          [x] { benchmark::DoNotOptimize(at::clamp(x, -1.0, 1.0)); }};
  }
  if (name == "cat") {
    const std::vector<at::Tensor> list{x, y, x, y};
    return {"aten::cat", "",    {list, 0},
            4,           false, [list] { benchmark::DoNotOptimize(at::cat(list)); }};
  }
  if (name == "native_layer_norm") {
    const std::vector<std::int64_t> shape{n};
    return {"aten::native_layer_norm", "", {x, shape, y, y, 1e-5}, 3, false, [x, y, shape] {
              benchmark::DoNotOptimize(at::native_layer_norm(x, shape, y, y, 1e-5));
            }};
  }
  if (name == "_softmax") {
    return {"aten::_softmax", "", {x, 0, false}, 1, false, [x] {
              benchmark::DoNotOptimize(at::_softmax(x, 0, false));
            }};
  }
  return {"aten::var", "correction", {x, c10::IValue(), 1, false}, 1, false, [x] {
            benchmark::DoNotOptimize(
                at::var(x, at::OptionalIntArrayRef(), std::optional<at::Scalar>(1), false));
          }};
}

OperatorHook& hook_of(const Case& example) {
  Runtime& runtime = Runtime::instance();
  const auto hook = runtime.register_operator(example.op, example.overload, "CPU");
  if (!hook) {
    std::fprintf(stderr, "%s\n", hook.status().message().c_str());
    std::abort();
  }
  hook.value()->set_active(true);
  return *hook.value();
}

void decide(const Case& example, std::string_view form) {
  OperatorHook& hook = hook_of(example);
  torch::jit::Stack stack(example.boxed.begin(), example.boxed.end());
  CallView view;
  if (const AsideReason reason = hook.read_call(stack, view); reason != AsideReason::kNone) {
    std::fprintf(stderr, "%s: %s\n", example.op, std::string(aside_reason_name(reason)).c_str());
    std::abort();
  }
  const std::span<const Word> words = view.key.words();
  if (form == "native") {
    hook.table().set_native(words, hash_words(words));
    return;
  }
  torch::jit::Stack answers(example.boxed.begin(), example.boxed.end());
  hook.call_native(c10::DispatchKeySet(c10::DispatchKey::CPU), &answers);
  std::vector<at::Tensor> outputs;
  for (const c10::IValue& answer : answers) {
    if (!example.writes) {
      outputs.push_back(answer.toTensor());
    }
  }
  hook.table().set_kernel(words, hash_words(words),
                          new AllocatingKernel(example.num_tensors, outputs));
}

void run(benchmark::State& state, const std::string& form, const std::string& op, std::int64_t n,
         bool inference) {
  at::set_num_threads(1);
  std::optional<c10::InferenceMode> mode;
  if (inference) {
    mode.emplace();
  }
  const at::NoGradGuard no_grad;
  // Hits and decisions are of other sizes: a table holds both.
  const Case example = make_case(op, form == "hit" ? n : n + 1);
  if (form != "stock") {
    hooks_answer.store(form != "off");
    decide(example, form == "hit" ? "hit" : "native");
  }
  for (auto _ : state) {
    example.call();
  }
  hooks_answer.store(false);
}

void register_all(const std::vector<std::string>& forms) {
  for (const std::string& form : forms) {
    for (const char* op : {"abs", "add", "add_", "add_out", "clamp", "cat", "native_layer_norm",
                           "_softmax", "var"}) {
      for (const std::int64_t n : {8, 4096}) {
        for (const bool inference : {true, false}) {
          if (form == "off" && (n != 8 || !inference)) {
            continue;
          }
          const std::string name =
              form + "/" + op + "/" + std::to_string(n) + "/" + (inference ? "inference" : "plain");
          benchmark::RegisterBenchmark(
              name.c_str(), [=](benchmark::State& state) { run(state, form, op, n, inference); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace eagercache

int main(int argc, char** argv) {
  const char* phase = std::getenv("EAGERCACHE_BENCH_PHASE");
  if (phase != nullptr && std::string_view(phase) == "hooked") {
    eagercache::register_all({"off", "native", "hit"});
  } else {
    eagercache::register_all({"stock"});
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
