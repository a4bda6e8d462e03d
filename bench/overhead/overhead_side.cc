#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <benchmark/benchmark.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/overhead/overhead_calls.h"
#include "dispatcher/hook/counters.h"
#include "dispatcher/hook/long_run.h"
#include "dispatcher/hook/operator_hook.h"
#include "dispatcher/kernels/kernel_forms.h"
#include "dispatcher/kernels/loaded_kernel.h"
#include "dispatcher/memory/output_allocation.h"
#include "dispatcher/runtime/runtime.h"

// What a call of ATen's own operators costs from C++ in its forms. An override cannot be taken
// away, so one process has one form, EAGERCACHE_BENCH_FORM, and takes turns with others
// (overhead_cpp.py):
//   stock   nothing is hooked; every other form has all operators hooked
//   off     the hooks are disabled
//   inside  the caller is inside of one of our kernels: one thread-local flag sends it to native
//   native  the call is decided for native, and every call is looked at
//   run     the same in a long run of an operator that has no kernel: few calls are looked at
//   mixed   the same in a long run of an operator that has a kernel, for other calls
//   hit     a kernel answers that allocates its outputs and computes nothing
// Hits of compiled kernels are overhead_hits.cc's. Matrix products are never hooked: none is here.
//
// On a GPU (EAGERCACHE_BENCH_KERNELS, a folder of cuda_overhead.py's) the forms stock, or native
// and hit, are Google Benchmarks named FORM/OPERATOR/8/TENSORS, and EAGERCACHE_BENCH_PHASE, stock
// or hooked, says which. Hits are real kernels, and what is measured is the host's time: nothing
// waits for the device. A third phase, "pairs", tells what a hook costs a call that it leaves to
// native: PyTorch's own kernel is registered over the hook and taken away again, and blocks of
// calls take turns. Printed as JSON, {FORM/OPERATOR/8/TENSORS: {"stock": [ns], "hooked": [ns],
// "again": [ns]}}, an item for each turn: a call without the hook, with it, and without it once
// more (what differs between the first and the last is noise). FORM is native, run or mixed.
namespace eagercache {
namespace {

using bench::Call;

// Where there are kernels for a GPU, as <operator>.plan and <operator>.cubin.
const char* cuda_kernels() { return std::getenv("EAGERCACHE_BENCH_KERNELS"); }
c10::DispatchKey dispatch_key() {
  return cuda_kernels() != nullptr ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

LoadedKernel* kept(const std::string& op, Result<std::unique_ptr<LoadedKernel>> kernel) {
  if (!kernel) {
    std::fprintf(stderr, "%s: %s\n", op.c_str(), kernel.status().message().c_str());
    std::abort();
  }
  return std::move(kernel).value().release();
}

LoadedKernel* cuda_kernel(const std::string& op) {
  const std::string path = std::string(cuda_kernels()) + "/" + op;
  const std::vector<std::string> objects{file_text(path + ".cubin")};
  return kept(op, make_cuda_kernel(objects, c10::Device(c10::DeviceType::CUDA, 0),
                                   {"cuda", file_text(path + ".plan"), {}}));
}

LoadedKernel* cuda_container(const std::string& op) {
  const Result<SharedLibrary> library =
      SharedLibrary::open(std::string(cuda_kernels()) + "/" + op + ".so");
  if (!library) {
    return kept(op, library.status());
  }
  return kept(op, make_kernel(library.value(), c10::Device(c10::DeviceType::CUDA, 0),
                              {"container", {}, {}}));
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

OperatorHook& hook_of(const Call& example) {
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

// Gives the call the verdict of `form`, "native", "hit", or on a GPU "container".
void decide(const Call& example, const std::string& name, std::string_view form) {
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
    LoadedKernel* const kernel = form == "container" ? cuda_container(name) : cuda_kernel(name);
    hook.table().set_kernel(words, hash_words(words), kernel);
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

// The calls of all operators that came to that so far.
std::uint64_t num_calls(CallOutcome outcome) {
  std::uint64_t total = 0;
  for (const OperatorHook* hook : Runtime::instance().hooks()) {
    total += read_counts(hook->index()).outcomes[static_cast<std::size_t>(outcome)];
  }
  return total;
}

// Seconds of one call, of `count` in a row. On a GPU the host's time, while the device is behind;
// of a few hundred calls, so that its queue is not full.
double seconds_a_call(const Call& example, int count) {
  if (cuda_kernels() != nullptr) {
    c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeDevice(0);
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) {
    example.make();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / count;
}

void time_on_gpu(benchmark::State& state, const Call& example) {
  for (auto _ : state) {
    state.SetIterationTime(seconds_a_call(example, 200));
  }
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeDevice(0);
}

void run_on_gpu(benchmark::State& state, const std::string& form, const std::string& op,
                const std::string& tensors) {
  std::optional<c10::InferenceMode> mode;
  if (tensors != "plain") {
    mode.emplace();
  }
  const at::NoGradGuard no_grad;
  const Call example = bench::make_call(op, 8, c10::DeviceType::CUDA);
  if (form != "stock") {
    hook_of(example).table().clear();
    hooks_answer.store(true);
    decide(example, op, form);
  }
  example.make();  // a container's first run loads its code
  const std::uint64_t hits = num_calls(CallOutcome::kHit);
  time_on_gpu(state, example);
  const bool by_kernel = form == "hit" || form == "container";
  if (by_kernel != (num_calls(CallOutcome::kHit) > hits)) {
    state.SkipWithError("not answered as its name says");
  }
  hooks_answer.store(false);
}

// One operator of the phase "pairs", as a member of a JSON object.
void print_pairs(const std::string& form, const std::string& op, const std::string& tensors) {
  constexpr std::size_t kTurns = 301;
  std::optional<c10::InferenceMode> mode;
  if (tensors != "plain") {
    mode.emplace();
  }
  const at::NoGradGuard no_grad;
  const Call example = bench::make_call(op, 8, c10::DeviceType::CUDA);
  OperatorHook& hook = hook_of(example);
  hook.table().clear();
  static std::uint32_t epochs = 0;
  native_run_epoch.store(form == "native" ? 0 : ++epochs);
  hooks_answer.store(true);
  decide(example, op, "native");
  if (form == "mixed") {
    decide(bench::make_call(op, 9, c10::DeviceType::CUDA), op, "hit");
  }
  for (std::uint32_t i = 0; i < 2 * kLongRun; ++i) {
    example.make();
  }
  const c10::KernelFunction native = hook.native_kernel();
  const auto without_hook = [&] {
    const c10::RegistrationHandleRAII registered = c10::Dispatcher::singleton().registerImpl(
        {example.op, example.overload}, dispatch_key(), native, std::nullopt, nullptr, "bench");
    return seconds_a_call(example, 200);
  };
  std::map<std::string, std::vector<double>> times;
  for (std::size_t turn = 0; turn < kTurns; ++turn) {
    // Each of the three is first as often as the others.
    for (std::size_t place = 0; place < 3; ++place) {
      const std::size_t side = (turn + place) % 3;
      const double seconds = side == 1 ? seconds_a_call(example, 200) : without_hook();
      times[std::array{"stock", "hooked", "again"}[side]].push_back(seconds * 1e9);
    }
  }
  hooks_answer.store(false);
  const nlohmann::json made = times;
  std::printf("\"%s/%s/8/%s\": %s", form.c_str(), op.c_str(), tensors.c_str(), made.dump().c_str());
}

void print_all_pairs() {
  const char* separator = "{";
  for (const char* form : {"native", "run", "mixed"}) {
    for (const char* op : {"abs", "add", "add_"}) {
      for (const char* tensors : {"inference", "plain"}) {
        std::printf("%s", separator);
        print_pairs(form, op, tensors);
        separator = ",\n";
      }
    }
  }
  std::printf("}\n");
}

int main_on_gpu(int argc, char** argv) {
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  at::set_num_threads(1);
  const char* phase = std::getenv("EAGERCACHE_BENCH_PHASE");
  if (phase != nullptr && std::string_view(phase) == "pairs") {
    print_all_pairs();
    return 0;
  }
  const bool hooked = phase != nullptr && std::string_view(phase) == "hooked";
  for (const std::string form : {"stock", "native", "hit", "container"}) {
    for (const std::string op : {"abs", "add", "add_"}) {
      if (form == "container" && op == "add_") {
        continue;  // none is made of what writes
      }
      for (const std::string tensors : {"inference", "plain"}) {
        if (hooked == (form == "stock")) {
          continue;
        }
        const std::string name = form + "/" + op + "/8/" + tensors;
        benchmark::RegisterBenchmark(
            name.c_str(), [=](benchmark::State& state) { run_on_gpu(state, form, op, tensors); })
            ->UseManualTime()
            ->Iterations(50);
      }
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

// Whether the call is answered as `form` says, once its run is long.
bool is_as(const std::string& form, const Call& call) {
  for (std::uint32_t i = 0; i < 2 * kLongRun; ++i) {
    call.make();
  }
  const std::uint64_t hits = num_calls(CallOutcome::kHit);
  const std::uint64_t natives = num_calls(CallOutcome::kNative);
  call.make();
  const bool is_native = form == "native" || form == "run" || form == "mixed";
  return num_calls(CallOutcome::kHit) - hits == (form == "hit" ? 1 : 0) &&
         num_calls(CallOutcome::kNative) - natives == (is_native ? 1 : 0);
}

// The blocks of a form. Most have no "boxed" calls of their own.
bench::Blocks blocks_of(const std::string& form) {
  const bool in_runs = form == "run" || form == "mixed";
  native_run_epoch.store(in_runs ? 1 : 0);
  hooks_answer.store(form != "stock" && form != "off");
  const auto prepare = [&](const std::string& name, const Call& call, const Call& other,
                           bool boxed) {
    if (form == "stock") {
      return true;
    }
    if (boxed && form != "native" && form != "mixed" && form != "hit") {
      return false;
    }
    decide(call, name, form == "hit" ? "hit" : "native");
    if (form == "mixed") {
      decide(other, name, "hit");
    }
    if (form != "inside" && !is_as(form, call)) {
      std::fprintf(stderr, "%s is not answered as %s says\n", name.c_str(), form.c_str());
      std::abort();
    }
    return true;
  };
  const auto inside = [](const std::function<void()>& block) {
    const InsideGuard guard;
    block();
  };
  bench::Blocks blocks =
      bench::all_blocks(prepare, form == "inside" ? bench::Around(inside) : bench::Around());
  if (form == "stock" || form == "hit") {
    bench::add_thread_blocks(blocks);
  }
  return blocks;
}

}  // namespace
}  // namespace eagercache

int main(int argc, char** argv) {
  if (eagercache::cuda_kernels() != nullptr) {
    return eagercache::main_on_gpu(argc, argv);
  }
  const char* form = std::getenv("EAGERCACHE_BENCH_FORM");
  return eagercache::bench::serve(eagercache::blocks_of(form != nullptr ? form : "stock"));
}
