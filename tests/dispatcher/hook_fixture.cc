#include "tests/dispatcher/hook_fixture.h"

#include <torch/library.h>

#include <chrono>
#include <deque>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <utility>

#include "dispatcher/plans/contract.h"

namespace eagercache {
namespace {

std::atomic<int> twice_runs{0};
std::atomic<int> refuse_runs{0};
std::atomic<int> inner_runs{0};

at::Tensor twice(const at::Tensor& x) {
  ++twice_runs;
  return x + x;
}

at::Tensor refuse(const at::Tensor& /*x*/) {
  ++refuse_runs;
  throw std::invalid_argument("refused by native");
}

at::Tensor inner(const at::Tensor& x) {
  ++inner_runs;
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("eagercache_test::twice", "")
      .typed<at::Tensor(const at::Tensor&)>()
      .call(x);
}

TORCH_LIBRARY(eagercache_test, library) {
  library.def("twice(Tensor x) -> Tensor");
  library.def("refuse(Tensor x) -> Tensor");
  library.def("inner(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(eagercache_test, CPU, library) {
  library.impl("twice", &twice);
  library.impl("refuse", &refuse);
  library.impl("inner", &inner);
}

std::pair<std::string, std::string> split(const std::string& name) {
  const std::size_t dot = name.find('.');
  return {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

void read(const OperatorHook& hook, const Values& arguments, CallView& view) {
  const torch::jit::Stack stack(arguments.begin(), arguments.end());
  ASSERT_EQ(hook.read_call(stack, view), AsideReason::kNone);
}

}  // namespace

LoadedKernel::Outcome FakeKernel::run(Inputs inputs, Outputs outputs,
                                      c10::Device /*device*/) noexcept {
  ++runs_;
  EXPECT_EQ(inputs.size(), num_inputs_);
  EXPECT_EQ(outputs.size(), num_outputs_);
  return body_(inputs, outputs);
}

void FakeHandler::submit(const CompileRequest& request) {
  {
    std::lock_guard lock(mutex_);
    requests_.push_back(request);
  }
  std::exception_ptr raised;
  try {
    if (action_) {
      action_(request);
    }
  } catch (...) {
    raised = std::current_exception();
  }
  {
    std::lock_guard lock(mutex_);
    ++handled_;
  }
  changed_.notify_all();
  if (raised) {
    std::rethrow_exception(raised);
  }
}

void FakeHandler::run_blocking(const std::function<bool()>& wait) {
  ++waits_;
  while (!wait()) {
  }
}

std::vector<CompileRequest> FakeHandler::requests() const {
  std::lock_guard lock(mutex_);
  return requests_;
}

CompileRequest FakeHandler::request(std::size_t index) const {
  std::unique_lock lock(mutex_);
  const bool there =
      changed_.wait_for(lock, std::chrono::seconds(20), [this, index] { return handled_ > index; });
  EXPECT_TRUE(there) << "there is no request number " << index;
  return there ? requests_[index] : CompileRequest{};
}

HookTest::HookTest() {
  set_on_miss(OnMiss::kNative);
  EXPECT_TRUE(runtime().set_answering(true));
}

HookTest::~HookTest() {
  runtime().set_answering(false);
  // A test may be the process's last: what libraries destroy at its end, the loader still uses.
  runtime().wait_until_idle(20);
  runtime().thaw();
  runtime().set_handler(nullptr);
  runtime().set_store(nullptr);
  for (OperatorHook* each : runtime().hooks()) {
    each->set_active(false);
    each->table().clear();
    each->classes().clear();
  }
}

void HookTest::set_on_miss(OnMiss on_miss, std::uint32_t compile_after) {
  Policy policy;
  policy.on_miss = on_miss;
  policy.compile_after = compile_after;
  runtime().set_policy(policy);
}

OperatorHook& HookTest::hook(const std::string& name) {
  const auto [operator_name, overload] = split(name);
  Result<OperatorHook*> result = runtime().register_operator(operator_name, overload, "CPU");
  if (!result) {
    throw std::runtime_error(result.status().to_string());
  }
  result.value()->set_active(true);
  return *result.value();
}

FakeKernel& HookTest::kernel(std::size_t inputs, std::size_t outputs, FakeKernel::Body body) {
  static auto* kernels = new std::deque<FakeKernel>();
  return kernels->emplace_back(inputs, outputs, std::move(body));
}

FakeKernel& HookTest::filling_kernel(double value, std::size_t inputs, std::size_t outputs) {
  return kernel(inputs, outputs, [value](FakeKernel::Inputs in, FakeKernel::Outputs out) {
    for (at::Tensor& output : out) {
      output = at::full_like(*in[0], value);
    }
    return LoadedKernel::Outcome::kAnswered;
  });
}

void HookTest::install(OperatorHook& hook, const Values& arguments, LoadedKernel& kernel) {
  CallView view;
  read(hook, arguments, view);
  hook.table().set_kernel(view.key.words(), hash_words(view.key.words()), &kernel);
}

EntryState HookTest::state(OperatorHook& hook, const Values& arguments) {
  CallView view;
  read(hook, arguments, view);
  return hook.table().find(view.key.words(), hash_words(view.key.words())).state;
}

std::vector<Word> HookTest::key_of(const OperatorHook& hook, const Values& arguments) {
  CallView view;
  read(hook, arguments, view);
  return {view.key.words().begin(), view.key.words().end()};
}

Digest HookTest::digest(OperatorHook& hook, const Values& arguments) {
  CallView view;
  read(hook, arguments, view);
  return hook.entry_digest(view.key.words(), "faster");
}

CallCounts HookTest::counted(const OperatorHook& hook, const std::function<void()>& calls) {
  const CallCounts before = read_counts(hook.index());
  calls();
  CallCounts counts = read_counts(hook.index());
  for (std::size_t i = 0; i < kCallOutcomeCount; ++i) {
    counts.outcomes[i] -= before.outcomes[i];
  }
  for (std::size_t i = 0; i < kAsideReasonCount; ++i) {
    counts.aside[i] -= before.aside[i];
  }
  return counts;
}

std::uint64_t HookTest::count(const CallCounts& counts, CallOutcome outcome) {
  return counts.outcomes[static_cast<std::size_t>(outcome)];
}

std::uint64_t HookTest::total(const CallCounts& counts) {
  std::uint64_t sum = 0;
  for (const std::uint64_t each : counts.outcomes) {
    sum += each;
  }
  return sum;
}

at::Tensor HookTest::call(const std::string& name, const at::Tensor& x) {
  const auto [operator_name, overload] = split(name);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(operator_name.c_str(), overload.c_str())
      .typed<at::Tensor(const at::Tensor&)>()
      .call(x);
}

int HookTest::native_runs(const std::string& name) {
  const std::map<std::string, const std::atomic<int>*> counters{
      {"twice", &twice_runs}, {"refuse", &refuse_runs}, {"inner", &inner_runs}};
  return counters.at(name)->load();
}

std::shared_ptr<FakeHandler> HookTest::use_handler(FakeHandler::Action action) {
  auto handler = std::make_shared<FakeHandler>(std::move(action));
  runtime().set_handler(handler);
  return handler;
}

std::shared_ptr<DiskStore> HookTest::use_store() {
  StoreOptions options;
  options.root = directory_.path() / "store";
  options.environment = "compiler: none\n";
  Result<std::unique_ptr<DiskStore>> opened = DiskStore::open(std::move(options));
  if (!opened) {
    throw std::runtime_error(opened.status().to_string());
  }
  const std::shared_ptr<DiskStore> store = std::move(opened).value();
  runtime().set_store(store);
  return store;
}

std::filesystem::path HookTest::object_made_for(const Manifest& manifest,
                                                const std::filesystem::path& object,
                                                const std::filesystem::path& target) {
  std::ifstream file(object, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const KernelForm form{manifest.fact("form"), manifest.fact("launch_plan"),
                        manifest.fact("output_strides")};
  const std::string contract = contract_of(manifest.key, form, manifest.cpu_features).hex();
  const std::size_t place = bytes.find(std::string(contract.size(), '0') + "\n");
  if (place == std::string::npos) {
    throw std::runtime_error(object.string() + " has no room for a contract");
  }
  bytes.replace(place, contract.size(), contract);
  std::ofstream(target, std::ios::binary) << bytes;
  return target;
}

}  // namespace eagercache
