#include "bench/overhead/overhead_calls.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

namespace eagercache::bench {
namespace {

using Clock = std::chrono::steady_clock;

// What is returned is dropped, as by a program that has used it.
template <typename Made>
void drop(Made made) {
  asm volatile("" : : "m"(made) : "memory");
}

double nanoseconds(Clock::duration elapsed, std::size_t calls) {
  return std::chrono::duration<double, std::nano>(elapsed).count() / static_cast<double>(calls);
}

std::string setting(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

bool needs_dimension(std::string_view name) {
  return name == "cat of 4" || name == "native_layer_norm";
}

// The calls that precede a block find the caches as another process has left them.
std::size_t untimed(std::size_t calls) { return calls / 4 + 1; }

double unboxed_block(const Call& call, std::size_t calls) {
  for (std::size_t i = 0; i < untimed(calls); ++i) {
    call.make();
  }
  const auto begin = Clock::now();
  for (std::size_t i = 0; i < calls; ++i) {
    call.make();
  }
  return nanoseconds(Clock::now() - begin, calls);
}

double boxed_block(const Call& call, std::size_t calls) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(call.op, call.overload);
  torch::jit::Stack stack;
  const auto make = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      stack.assign(call.boxed.begin(), call.boxed.end());
      op.callBoxed(&stack);
    }
  };
  make(untimed(calls));
  const auto begin = Clock::now();
  make(calls);
  return nanoseconds(Clock::now() - begin, calls);
}

Block block_of(std::shared_ptr<const Call> call, const std::string& kind, const Around& around) {
  return [=](std::size_t calls) {
    std::optional<c10::InferenceMode> mode;
    if (kind != "plain") {
      mode.emplace();
    }
    const at::NoGradGuard no_grad;
    double ns = 0;
    const auto block = [&] {
      ns = kind == "boxed" ? boxed_block(*call, calls) : unboxed_block(*call, calls);
    };
    around ? around(block) : block();
    return ns;
  };
}

// A processor of each core, then the others; whatever this process is bound to.
const std::vector<int>& processors() {
  static const std::vector<int> kAll = [] {
    std::vector<int> firsts;
    std::vector<int> siblings;
    for (int cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN); ++cpu) {
      int first = cpu;
      std::ifstream("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                    "/topology/thread_siblings_list") >>
          first;
      (first == cpu ? firsts : siblings).push_back(cpu);
    }
    firsts.insert(firsts.end(), siblings.begin(), siblings.end());
    return firsts;
  }();
  return kAll;
}

// Threads take their own times: who waits for them shares a core with one of them.
double threads_block(std::size_t count, std::size_t calls) {
  std::barrier start(static_cast<std::ptrdiff_t>(count));
  std::vector<Clock::time_point> begins(count);
  std::vector<Clock::time_point> ends(count);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      cpu_set_t cores;
      CPU_ZERO(&cores);
      CPU_SET(static_cast<std::size_t>(processors()[i % processors().size()]), &cores);
      sched_setaffinity(0, sizeof cores, &cores);
      const c10::InferenceMode inference;
      at::set_num_threads(1);
      const Call call = make_call("abs", 8);
      for (std::size_t k = 0; k < untimed(calls); ++k) {
        call.make();
      }
      start.arrive_and_wait();
      begins[i] = Clock::now();
      for (std::size_t k = 0; k < calls; ++k) {
        call.make();
      }
      ends[i] = Clock::now();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return nanoseconds(std::ranges::max(ends) - std::ranges::min(begins), calls);
}

}  // namespace

const std::vector<std::string>& call_names() {
  static const std::vector<std::string> kNames{
      "abs", "add", "add_", "add.out", "clamp", "cat of 4", "_softmax", "native_layer_norm", "var"};
  return kNames;
}

Call make_call(std::string_view name, std::int64_t elements, c10::DeviceType device) {
  const std::vector<std::int64_t> sizes(elements == 0 ? 0 : 1, elements);
  const at::Tensor x = at::randn(sizes, at::device(device));
  const at::Tensor y = at::randn(sizes, at::device(device));
  if (name == "abs") {
    return {"aten::abs", "", {x}, 1, false, [x] { drop(at::abs(x)); }};
  }
  if (name == "add") {
    return {"aten::add", "Tensor", {x, y, 1}, 2, false, [x, y] { drop(at::add(x, y)); }};
  }
  if (name == "add_") {
    return {"aten::add_", "Tensor", {x, y, 1}, 2, true, [x, y]() mutable { x.add_(y); }};
  }
  if (name == "add.out") {
    at::Tensor out = at::empty(sizes, at::device(device));
    return {"aten::add", "out", {x, y, 1, out},
            3,           true,  [x, y, out]() mutable {
              at::add_out(out, x, y); }};
  }
  if (name == "clamp") {
    return {"aten::clamp", "", {x, -1.0, 1.0}, 1, false, [x] { drop(at::clamp(x, -1.0, 1.0)); }};
  }
  if (name == "cat of 4") {
    const std::vector<at::Tensor> list{x, y, x, y};
    return {"aten::cat", "", {list, 0}, 4, false, [list] { drop(at::cat(list)); }};
  }
  if (name == "native_layer_norm") {
    const std::vector<std::int64_t> shape{elements};
    return {"aten::native_layer_norm", "", {x, shape, y, y, 1e-5}, 3, false, [x, y, shape] {
              drop(at::native_layer_norm(x, shape, y, y, 1e-5));
            }};
  }
  if (name == "_softmax") {
    return {
        "aten::_softmax", "", {x, 0, false}, 1, false, [x] {
              drop(at::_softmax(x, 0, false)); }};
  }
  return {"aten::var", "correction", {x, c10::IValue(), 0, false}, 1, false, [x] {
            drop(at::var(x, at::OptionalIntArrayRef(), std::optional<at::Scalar>(0), false));
          }};
}

Blocks all_blocks(const Prepare& prepare, const Around& around) {
  at::set_num_threads(1);
  const std::string only = setting("EAGERCACHE_BENCH_ONLY", "");
  Blocks blocks;
  std::istringstream sizes(setting("EAGERCACHE_BENCH_SIZES", "0,8,4096"));
  for (std::string size; std::getline(sizes, size, ',');) {
    const std::int64_t elements = std::stoll(size);
    for (const std::string& name : call_names()) {
      if (name.find(only) == std::string::npos || (elements == 0 && needs_dimension(name))) {
        continue;
      }
      for (const std::string kind : {"inference", "plain", "boxed"}) {
        std::optional<c10::InferenceMode> mode;
        if (kind != "plain") {
          mode.emplace();
        }
        const at::NoGradGuard no_grad;
        auto call = std::make_shared<const Call>(make_call(name, elements));
        if (prepare(name, *call, make_call(name, elements + 1), kind == "boxed")) {
          blocks[name + ", " + size + ", " + kind] = block_of(std::move(call), kind, around);
        }
      }
    }
  }
  return blocks;
}

void add_thread_blocks(Blocks& blocks) {
  for (const std::size_t count : {1, 2}) {
    blocks["abs, 8, threads " + std::to_string(count)] = [count](std::size_t calls) {
      // Starting threads takes as long as a hundred calls.
      return threads_block(count, 10 * calls);
    };
  }
}

int serve(const Blocks& blocks) {
  std::vector<std::string> names;
  for (const auto& [name, block] : blocks) {
    names.push_back(name);
  }
  std::cout << "READY " << nlohmann::json{{"calls", names}} << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    const auto request = nlohmann::json::parse(line);
    std::cout << blocks.at(request.at(0).get<std::string>())(request.at(1).get<std::size_t>())
              << std::endl;
  }
  // What is measured has no state to bring home.
  std::cout.flush();
  std::_Exit(0);
}

}  // namespace eagercache::bench
