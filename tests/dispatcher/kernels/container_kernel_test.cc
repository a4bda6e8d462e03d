// Runs of a container that comes to ContainerFrame.

#include "dispatcher/kernels/container_kernel.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "dispatcher/kernels/kernel_forms.h"
#include "tests/support/counted_allocations.h"

namespace eagercache {
namespace {

using Outcome = LoadedKernel::Outcome;

std::unique_ptr<LoadedKernel> load() {
  Result<SharedLibrary> library = SharedLibrary::open(EAGERCACHE_TEST_CONTAINER_OBJECT);
  if (!library) {
    throw std::runtime_error(library.status().to_string());
  }
  auto kernel = make_kernel(library.value(), c10::Device("cpu"), {"container", {}, {}});
  if (!kernel) {
    throw std::runtime_error(kernel.status().to_string());
  }
  return std::move(kernel).value();
}

struct Answer {
  Outcome outcome;
  std::array<at::Tensor, 2> outputs;
};

Answer run(LoadedKernel& kernel, const at::Tensor& x, const at::Tensor& y) {
  const std::array<const at::Tensor*, 2> inputs{&x, &y};
  Answer answer;
  answer.outcome = kernel.run(inputs, answer.outputs, x.device());
  return answer;
}

void expect_sum(const Answer& answer, const at::Tensor& x, const at::Tensor& y) {
  ASSERT_EQ(answer.outcome, Outcome::kAnswered);
  EXPECT_TRUE(at::equal(answer.outputs[0], x + y));
  EXPECT_EQ(answer.outputs[0].storage().nbytes(), static_cast<std::size_t>(x.numel()) * 4);
  EXPECT_TRUE(answer.outputs[1].is_same(x));
}

TEST(ContainerKernel, AllocatesNothingOnTheHeapFromTheSecondRunOn) {
  const auto kernel = load();
  const c10::InferenceMode mode;  // other tensors have a version counter on the heap
  const at::Tensor x = at::rand({5});
  const at::Tensor y = at::rand({5});
  const auto allocations = [&] {
    const std::size_t before = thread_allocations();
    const Answer answer = run(*kernel, x, y);
    return thread_allocations() - before;
  };
  EXPECT_GT(allocations(), 0U) << "the first run is torch's";
  EXPECT_EQ(allocations(), 0U);
  EXPECT_EQ(x.use_count(), 1U) << "no handle of it is left";
  expect_sum(run(*kernel, x, y), x, y);
}

TEST(ContainerKernel, LeavesToTorchWhatTheFirstRunDidNotMake) {
  const auto kernel = load();
  for (const std::int64_t size : {5, 7, 5, 0, 3000, 7}) {
    const at::Tensor x = at::rand({size});
    const at::Tensor y = at::rand({size});
    expect_sum(run(*kernel, x, y), x, y);
  }
}

TEST(ContainerKernel, KeepsNothingOfARunThatFailed) {
  const auto kernel = load();
  const at::Tensor bad = at::rand({13});
  EXPECT_EQ(run(*kernel, bad, bad).outcome, Outcome::kFailed) << "a first run";
  const at::Tensor x = at::rand({5});
  for (int i = 0; i < 2; ++i) {
    expect_sum(run(*kernel, x, x), x, x);
  }
  EXPECT_EQ(run(*kernel, bad, bad).outcome, Outcome::kFailed);
  EXPECT_EQ(bad.use_count(), 1U);
  expect_sum(run(*kernel, x, x), x, x);
}

TEST(ContainerKernel, MakesInferenceTensorsInInferenceMode) {
  const auto kernel = load();
  const at::Tensor x = at::rand({5});
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(run(*kernel, x, x).outputs[0].is_inference());
    const c10::InferenceMode mode;
    EXPECT_TRUE(run(*kernel, x, x).outputs[0].is_inference());
  }
}

TEST(ContainerKernel, RunsOnManyThreadsWhoseAnswersOthersFree) {
  const auto kernel = load();
  constexpr int kThreads = 4;
  constexpr std::size_t kRuns = 2000;
  std::array<std::vector<at::Tensor>, kThreads> kept;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const at::Tensor x = at::full({5}, t, at::kFloat);
      while (kept.at(t).size() < kRuns) {
        const Answer answer = run(*kernel, x, x);
        if (answer.outcome == Outcome::kAnswered) {
          kept.at(t).push_back(answer.outputs[0]);
        } else {  // another thread makes the first run, for which it may have to wait
          std::this_thread::yield();
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int t = 0; t < kThreads; ++t) {
    const at::Tensor wanted = at::full({5}, 2 * t, at::kFloat);
    for (const at::Tensor& answer : kept.at(t)) {
      ASSERT_TRUE(at::equal(answer, wanted));
    }
  }
}

}  // namespace
}  // namespace eagercache
