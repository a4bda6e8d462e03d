// An artifact of `Steps` (deploy_zoo.py) in a program without Python: cpp_artifact FILE KEY DEVICE.
//
// Threads ask it, each on a stream of its own, while its weights are updated and swapped. Prints
// what came of it; exit code 2 where the artifact is refused.

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <eagercache/deployed_module.h>

#include <atomic>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 4;
constexpr int kUpdates = 300;

// All weights of version n have this value.
float value_of(std::uint64_t version) { return static_cast<float>((version - 1) % 61 + 1); }

std::map<std::string, at::Tensor> state(float value, at::Device device) {
  const auto options = at::TensorOptions(device).dtype(at::kFloat);
  return {{"first.weight", at::full({4, 8}, value, options)},
          {"first.bias", at::full({4}, value, options)},
          {"scale", at::full({4}, value, options)},
          {"shift", at::full({4}, value, options)}};
}

// With every constant v, the answer to ones is (8 v + v + 2 v) v.
bool is_right(const eagercache::RunResult& result) {
  const float value = value_of(result.version);
  return result && result.outputs[0].cpu().eq(11 * value * value).all().item<bool>();
}

void ask(const eagercache::DeployedModule& module, const std::atomic<bool>& stop,
         std::atomic<int>& right, std::atomic<int>& wrong) {
  std::optional<c10::StreamGuard> stream;
  const at::Device device = module.device();
  if (!device.is_cpu()) {
    stream.emplace(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  const at::Tensor ones = at::ones({2, 8}, at::TensorOptions(device));
  while (!stop) {
    ++(is_right(module.run({ones})) ? right : wrong);
  }
}

int refused(const eagercache::DeployStatus& status) {
  std::cout << "refused " << status.code << ": " << status.reason << '\n';
  return 2;
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) {
    std::cerr << "cpp_artifact FILE KEY DEVICE\n";
    return 1;
  }
  if (const auto check = eagercache::check_artifact(words[1], {words[2]}); !check) {
    return refused(check);
  }
  eagercache::LoadOptions options;
  options.trusted_keys = {words[2]};
  if (const std::string device = words[3]; device != "default") {
    options.device = at::Device(device);
  }
  const auto loaded = eagercache::DeployedModule::load(words[1], options);
  if (!loaded) {
    return refused(loaded);
  }
  const eagercache::DeployedModule& module = loaded.module;
  std::cout << "device " << module.device() << '\n';
  std::atomic<bool> stop{false};
  std::atomic<int> right{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] { ask(module, stop, right, wrong); });
  }
  int failed = 0;
  for (int i = 0; i < kUpdates; ++i) {
    const int met = right + wrong;
    // By turns tensors of the host and of the module's device.
    const at::Device from = i % 2 == 0 ? at::Device(at::kCPU) : module.device();
    const auto values = state(value_of(static_cast<std::uint64_t>(i) + 2), from);
    const bool done = module.update_constants(values, {eagercache::ConstantSet::kInactive, true}) &&
                      module.swap_constants();
    failed += done ? 0 : 1;
    while (right + wrong == met) {
      std::this_thread::yield();
    }
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::cout << "right " << right << " wrong " << wrong << " failed " << failed << '\n';
  if (!module.device().is_cpu()) {
    std::cout << "host: " << module.run({at::ones({2, 8})}).reason << '\n';
  }
  const auto values = module.constant_values();
  const bool theirs = values && values.values.at("scale").device() == module.device();
  std::cout << "values " << (theirs ? "there" : "elsewhere") << '\n';
  return 0;
}
