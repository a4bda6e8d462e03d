#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <sched.h>

#include <array>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "dispatcher/counters.h"
#include "dispatcher/kernel_forms.h"
#include "dispatcher/loaded_kernel.h"
#include "dispatcher/operator_hook.h"
#include "dispatcher/output_allocation.h"
#include "dispatcher/runtime.h"

// What a call of ATen's own operators costs from C++ in its forms. An override cannot be taken
// away, so a process measures one phase, EAGERCACHE_BENCH_PHASE, and run.py runs both by turns:
//   stock   nothing is hooked
//   hooked  the operators are hooked:
//     off     the hooks are disabled
//     native  the call is decided for native, and every call is looked at
//     run     the same in a long run of an operator that has no kernel: few calls are looked at
//     mixed   the same in a long run of an operator that has a kernel, for other calls
//     hit     a kernel answers that allocates its outputs and computes nothing
// Matrix products are never hooked, so that none is here. Names are FORM/OPERATOR/ELEMENTS/TENSORS:
// 0 elements stand for one element without dimensions; tensors are "inference" or "plain" ones
// (that autograd looks at), and "boxed" calls are those of inference tensors by callBoxed. The two
// of "threads" are the wall time of a call where one or two threads make calls, each on a core.
//
// A third phase, "pairs", tells what a hook costs a call that it leaves to native to within
// nanoseconds, which two processes cannot: in one process PyTorch's own kernel is registered over
// the hook and taken away again, and blocks of calls take turns. Printed as JSON,
// {FORM/OPERATOR/ELEMENTS/TENSORS: {"stock": [ns], "hooked": [ns], "again": [ns]}}, an item for
// each turn: a call without the hook, with it, and without it once more (what differs between the
// first and the last is noise). FORM is native, run or mixed.
//
// On a GPU (EAGERCACHE_BENCH_KERNELS, a folder of cuda_overhead.py's) hits are real kernels on 8
// floats, and what is measured is the host's time: nothing waits for the device.
namespace eagercache {
namespace {

// Where there are kernels for a GPU, as <operator>.plan and <operator>.cubin.
const char* cuda_kernels() { return std::getenv("EAGERCACHE_BENCH_KERNELS"); }
c10::DeviceType device_type() {
  return cuda_kernels() != nullptr ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}
c10::DispatchKey dispatch_key() {
  return cuda_kernels() != nullptr ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

LoadedKernel* cuda_kernel(const std::string& op) {
  const std::string path = std::string(cuda_kernels()) + "/" + op;
  const std::vector<std::string> objects{file_text(path + ".cubin")};
  Result<std::unique_ptr<LoadedKernel>> kernel = make_cuda_kernel(
      objects, c10::Device(c10::DeviceType::CUDA, 0), {"cuda", file_text(path + ".plan"), {}});
  if (!kernel) {
    std::fprintf(stderr, "%s: %s\n", op.c_str(), kernel.status().message().c_str());
    std::abort();
  }
  return std::move(kernel).value().release();
}

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
  const std::vector<std::int64_t> sizes(n == 0 ? 0 : 1, n);
  const at::Tensor x = at::randn(sizes, at::device(device_type()));
  const at::Tensor y = at::randn(sizes, at::device(device_type()));
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
    at::Tensor out = at::empty(sizes);
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
  const auto hook =
      runtime.register_operator(example.op, example.overload, c10::toString(dispatch_key()));
  if (!hook) {
    std::fprintf(stderr, "%s\n", hook.status().message().c_str());
    std::abort();
  }
  hook.value()->set_active(true);
  return *hook.value();
}

void decide(const Case& example, const std::string& name, std::string_view form) {
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
  if (cuda_kernels() != nullptr) {
    hook.table().set_kernel(words, hash_words(words), cuda_kernel(name));
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

std::uint64_t num_hits() {
  std::uint64_t total = 0;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    total += read_counts(hook->index()).outcomes[static_cast<std::size_t>(CallOutcome::kHit)];
  }
  return total;
}

// Seconds of one call, of `count` in a row. On a GPU the host's time, while the device is behind;
// of a few hundred calls, so that its queue is not full.
double seconds_a_call(const Case& example, int count) {
  if (cuda_kernels() != nullptr) {
    c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeDevice(0);
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    example.call();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / count;
}

void time_on_gpu(benchmark::State& state, const Case& example) {
  for (auto _ : state) {
    state.SetIterationTime(seconds_a_call(example, 200));
  }
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeDevice(0);
}

// Brings the hook into the state that `form` means, for `example`; `other` is another call.
void prepare(const std::string& form, const std::string& op, const Case& example,
             const Case& other) {
  OperatorHook& hook = hook_of(example);
  hook.table().clear();
  hooks_answer.store(form != "off");
  static std::uint32_t epochs = 0;
  ++epochs;
  native_run_epoch.store(form == "run" || form == "mixed" ? epochs : 0);
  decide(example, op, form == "hit" ? "hit" : "native");
  if (form == "mixed") {
    decide(other, op, "hit");
  }
  for (std::uint32_t i = 0; i < 2 * kLongRun; ++i) {
    example.call();
  }
}

void call_boxed(benchmark::State& state, const Case& example) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(example.op, example.overload);
  torch::jit::Stack stack;
  for (auto _ : state) {
    stack.assign(example.boxed.begin(), example.boxed.end());
    op.callBoxed(&stack);
  }
}

void run(benchmark::State& state, const std::string& form, const std::string& op, std::int64_t n,
         const std::string& tensors) {
  at::set_num_threads(1);
  std::optional<c10::InferenceMode> mode;
  if (tensors != "plain") {
    mode.emplace();
  }
  const at::NoGradGuard no_grad;
  const Case example = make_case(op, n);
  if (form != "stock") {
    prepare(form, op, example, make_case(op, n + 1));
  }
  if (cuda_kernels() != nullptr) {
    const std::uint64_t hits = num_hits();
    time_on_gpu(state, example);
    if ((form == "hit") != (num_hits() > hits)) {
      state.SkipWithError("not answered as its name says");
    }
  } else if (tensors == "boxed") {
    call_boxed(state, example);
  } else {
    for (auto _ : state) {
      example.call();
    }
  }
  hooks_answer.store(false);
}

// One operator of the phase "pairs", as a member of a JSON object.
void print_pairs(const std::string& form, const std::string& op, std::int64_t n,
                 const std::string& tensors) {
  constexpr std::size_t kTurns = 301;
  const int calls = cuda_kernels() != nullptr ? 200 : 1'000;
  at::set_num_threads(1);
  std::optional<c10::InferenceMode> mode;
  if (tensors != "plain") {
    mode.emplace();
  }
  const at::NoGradGuard no_grad;
  const Case example = make_case(op, n);
  prepare(form, op, example, make_case(op, n + 1));
  const c10::KernelFunction native = hook_of(example).native_kernel();
  const auto without_hook = [&] {
    const c10::RegistrationHandleRAII registered = c10::Dispatcher::singleton().registerImpl(
        {example.op, example.overload}, dispatch_key(), native, std::nullopt, nullptr, "bench");
    return seconds_a_call(example, calls);
  };
  std::map<std::string, std::vector<double>> times;
  for (std::size_t turn = 0; turn < kTurns; ++turn) {
    // Each of the three is first as often as the others.
    for (std::size_t place = 0; place < 3; ++place) {
      const std::size_t side = (turn + place) % 3;
      const double seconds = side == 1 ? seconds_a_call(example, calls) : without_hook();
      times[std::array{"stock", "hooked", "again"}[side]].push_back(seconds * 1e9);
    }
  }
  std::printf("\"%s/%s/%lld/%s\": {", form.c_str(), op.c_str(), static_cast<long long>(n),
              tensors.c_str());
  for (const auto& [side, values] : times) {
    std::printf("%s\"%s\": [", side == times.begin()->first ? "" : ", ", side.c_str());
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::printf("%s%.1f", i == 0 ? "" : ", ", values[i]);
    }
    std::printf("]");
  }
  std::printf("}");
}

void print_all_pairs() {
  std::vector<const char*> operators{"abs", "add", "add_"};
  if (cuda_kernels() == nullptr) {
    operators.insert(operators.end(), {"add_out", "clamp", "cat", "native_layer_norm"});
  }
  const char* separator = "{";
  for (const char* form : {"native", "run", "mixed"}) {
    for (const char* op : operators) {
      for (const char* tensors : {"inference", "plain"}) {
        std::printf("%s", separator);
        print_pairs(form, op, 8, tensors);
        separator = ",\n";
      }
    }
  }
  std::printf("}\n");
}

// Threads that call for their tensors, each on a core of its own where there are so many.
void run_threads(benchmark::State& state, const std::string& form, std::size_t count) {
  constexpr int kCalls = 20'000;
  const c10::InferenceMode mode;
  at::set_num_threads(1);
  if (form == "hit") {
    prepare(form, "abs", make_case("abs", 8), make_case("abs", 9));
  }
  for (auto _ : state) {
    std::barrier start(static_cast<std::ptrdiff_t>(count) + 1);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < count; ++i) {
      threads.emplace_back([&, i] {
        cpu_set_t cores;
        CPU_ZERO(&cores);
        CPU_SET(i % std::thread::hardware_concurrency(), &cores);
        sched_setaffinity(0, sizeof cores, &cores);
        const c10::InferenceMode inference;
        at::set_num_threads(1);
        const Case example = make_case("abs", 8);
        example.call();
        start.arrive_and_wait();
        for (int k = 0; k < kCalls; ++k) {
          example.call();
        }
      });
    }
    start.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    for (std::thread& thread : threads) {
      thread.join();
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(elapsed.count() / kCalls);
  }
  hooks_answer.store(false);
}

// Whether there is such a figure.
bool exists(const std::string& form, std::string_view op, std::int64_t n,
            std::string_view tensors) {
  const bool needs_dimension = op == "cat" || op == "native_layer_norm";
  const bool usual = n == 8 && tensors == "inference";
  if (tensors == "boxed") {
    return n == 8 && (form == "stock" || form == "native" || form == "mixed" || form == "hit");
  }
  if (form == "off" || form == "run") {
    return usual && (form == "off" || cuda_kernels() == nullptr);
  }
  if (form == "mixed" && cuda_kernels() != nullptr) {
    return false;
  }
  return n != 0 || (!needs_dimension && tensors == "inference");
}

void register_all(const std::vector<std::string>& forms) {
  std::vector<const char*> operators{"abs", "add", "add_"};
  std::vector<std::int64_t> sizes{8};
  std::vector<std::string> kinds{"inference", "plain"};
  if (cuda_kernels() == nullptr) {
    for (const char* op : {"add_out", "clamp", "cat", "native_layer_norm", "_softmax", "var"}) {
      operators.push_back(op);
    }
    sizes = {0, 8, 4096};
    kinds.emplace_back("boxed");
  }
  for (const std::string& form : forms) {
    for (const char* op : operators) {
      for (const std::int64_t n : sizes) {
        for (const std::string& tensors : kinds) {
          if (!exists(form, op, n, tensors)) {
            continue;
          }
          const std::string name = form + "/" + op + "/" + std::to_string(n) + "/" + tensors;
          auto* const registered = benchmark::RegisterBenchmark(
              name.c_str(), [=](benchmark::State& state) { run(state, form, op, n, tensors); });
          if (cuda_kernels() != nullptr) {
            registered->UseManualTime()->Iterations(50);
          }
        }
      }
    }
    for (const std::size_t count : {1, 2}) {
      if (cuda_kernels() == nullptr && (form == "stock" || form == "hit")) {
        const std::string name = form + "/abs/8/threads " + std::to_string(count);
        benchmark::RegisterBenchmark(
            name.c_str(), [=](benchmark::State& state) { run_threads(state, form, count); })
            ->UseManualTime()
            ->Iterations(1);
      }
    }
  }
}

}  // namespace
}  // namespace eagercache

int main(int argc, char** argv) {
  if (eagercache::cuda_kernels() != nullptr &&
      dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const char* phase = std::getenv("EAGERCACHE_BENCH_PHASE");
  if (phase != nullptr && std::string_view(phase) == "pairs") {
    eagercache::print_all_pairs();
    return 0;
  }
  if (phase != nullptr && std::string_view(phase) == "hooked") {
    eagercache::register_all({"off", "native", "run", "mixed", "hit"});
  } else {
    eagercache::register_all({"stock"});
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
