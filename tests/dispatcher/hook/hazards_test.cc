// Hazards of the table in tests/hazards.json that no other file of this folder is about.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <c10/core/impl/COW.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <array>
#include <atomic>

#include "guards/builder/key_builder.h"
#include "tests/dispatcher/hook_fixture.h"
#include "tests/support/counted_allocations.h"

namespace eagercache {
namespace {

// More elements than 31 bits count, in four bytes.
at::Tensor huge(const at::Tensor& x) { return x.new_zeros({1}).expand({std::int64_t{1} << 31}); }

TORCH_LIBRARY_FRAGMENT(eagercache_test, library) { library.def("huge(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(eagercache_test, CPU, library) { library.impl("huge", &huge); }

class HazardTest : public HookTest {
 protected:
  const at::Tensor x_ = at::linspace(0.0, 1.0, 32).reshape({4, 8});
};

TEST_F(HazardTest, TensorsOfAnotherDeviceThanTheHooksStepAside) {
  const ArgumentPlan plan =
      make_argument_plan(torch::jit::parseSchema("test::op(Tensor x) -> Tensor")).plan;
  const c10::IValue argument(x_);
  CallView view;
  EXPECT_EQ(build_key(plan, {&argument, 1}, c10::DeviceType::CUDA, view),
            AsideReason::kMixedDevices);
  EXPECT_EQ(build_key(plan, {&argument, 1}, c10::DeviceType::CPU, view), AsideReason::kNone);
}

TEST_F(HazardTest, CallsForAnotherDeviceThanTheirTensorsStepAside) {
  const ArgumentPlan plan =
      make_argument_plan(torch::jit::parseSchema("test::op(Tensor x, Device? to) -> Tensor")).plan;
  const auto reason = [&](c10::DeviceType type, c10::IValue device) {
    const std::array<c10::IValue, 2> arguments{x_, std::move(device)};
    CallView view;
    return build_key(plan, arguments, type, view);
  };
  EXPECT_EQ(reason(c10::DeviceType::CPU, c10::IValue()), AsideReason::kNone);
  EXPECT_EQ(reason(c10::DeviceType::CPU, c10::Device("cpu")), AsideReason::kNone);
  EXPECT_EQ(reason(c10::DeviceType::CPU, c10::Device("cuda:0")), AsideReason::kMixedDevices);
}

TEST_F(HazardTest, NumbersInHostMemoryBesideCudaTensorsHaveAKeyWithoutTheirValue) {
  const ArgumentPlan plan =
      make_argument_plan(torch::jit::parseSchema("test::op(Tensor x) -> Tensor")).plan;
  const auto key_of = [&](const at::Tensor& number) {
    const c10::IValue argument(number);
    CallView view;
    EXPECT_EQ(build_key(plan, {&argument, 1}, c10::DeviceType::CUDA, view), AsideReason::kNone);
    return std::vector<Word>(view.key.words().begin(), view.key.words().end());
  };
  EXPECT_EQ(key_of(at::scalar_tensor(2.0)), key_of(at::scalar_tensor(3.0)));
  EXPECT_NE(key_of(at::scalar_tensor(2.0)), key_of(at::scalar_tensor(2.0, at::dtype(at::kDouble))));
  const at::Tensor wrapped = at::scalar_tensor(2.0, at::dtype(at::kDouble));
  const std::vector<Word> plain = key_of(wrapped);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  EXPECT_NE(plain, key_of(wrapped));
  // A complex number is no argument that our kernels take by value.
  const c10::IValue complex(at::scalar_tensor(2.0, at::dtype(at::kComplexDouble)));
  CallView view;
  EXPECT_EQ(build_key(plan, {&complex, 1}, c10::DeviceType::CUDA, view),
            AsideReason::kMixedDevices);
}

TEST_F(HazardTest, CallsFromInsideAParallelRegionStepAside) {
  OperatorHook& sin = hook("aten::sin");
  FakeKernel& fake = filling_kernel(42);
  install(sin, {x_}, fake);
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  std::atomic<int> inside{0};
  std::atomic<int> aside{0};
  // Torch's own loop: it is what was built with OpenMP.
  const at::Tensor source = at::ones({64, 1024});
  at::Tensor target = at::empty_like(source);
  at::TensorIterator::unary_op(target, source)
      .for_each(
          [&](char** /*data*/, const std::int64_t* /*strides*/, std::int64_t /*inner*/,
              std::int64_t /*outer*/) {
            CallView view;
            const torch::jit::Stack stack{x_};
            inside += at::in_parallel_region() ? 1 : 0;
            aside += sin.read_call(stack, view) == AsideReason::kParallelRegion ? 1 : 0;
          },
          /*grain_size=*/1);
  at::set_num_threads(threads);
  EXPECT_GT(inside.load(), 0);
  EXPECT_EQ(aside.load(), inside.load());
}

TEST_F(HazardTest, TheSameTensorTwiceIsTwoInputs) {
  OperatorHook& add = hook("aten::add.Tensor");
  FakeKernel& fake = kernel(2, 1, [](FakeKernel::Inputs in, FakeKernel::Outputs out) {
    out[0] = at::scalar_tensor(in[0]->is_same(*in[1]) ? 1.0 : 0.0);
    return LoadedKernel::Outcome::kAnswered;
  });
  install(add, {x_, x_, 1}, fake);
  EXPECT_EQ(at::add(x_, x_).item<double>(), 1.0);
  EXPECT_EQ(at::add(x_, at::ones({4, 8})).item<double>(), 0.0);  // the same key: values are data
}

TEST_F(HazardTest, ReadingACopyOnWriteTensorDoesNotCopyIt) {
  const at::Tensor lazy = at::_lazy_clone(x_);
  const auto is_lazy = [&lazy] {
    return c10::impl::cow::is_cow_data_ptr(lazy.storage().data_ptr());
  };
  ASSERT_TRUE(is_lazy());
  EXPECT_EQ(read_tensor(lazy), read_tensor(x_));
  EXPECT_TRUE(is_lazy());
}

TEST_F(HazardTest, FindingAKernelAllocatesNothing) {
  OperatorHook& sum = hook("aten::sum.dim_IntList");
  const torch::jit::Stack stack{x_, std::vector<std::int64_t>{1}, false, c10::IValue()};
  install(sum, {stack.begin(), stack.end()}, filling_kernel(42));
  CallView view;
  Found found;
  const auto find = [&] {
    if (sum.read_call(stack, view) == AsideReason::kNone) {
      found = sum.table().find(view.key.words(), hash_words(view.key.words()));
    }
  };
  find();  // a thread's first reading makes its slot
  found = {};
  const std::size_t before = thread_allocations();
  find();
  EXPECT_EQ(thread_allocations(), before);
  EXPECT_EQ(found.state, EntryState::kKernel);
  (void)at::zeros({1});
  EXPECT_GT(thread_allocations(), before);  // they are counted
}

TEST_F(HazardTest, AnOutputPast31BitsLeavesTheKeyNative) {
  OperatorHook& hooked = hook("eagercache_test::huge");
  const std::shared_ptr<FakeHandler> handler = use_handler();
  const std::shared_ptr<DiskStore> store = use_store();
  set_on_miss(OnMiss::kBackground, 1);
  const at::Tensor result = call("eagercache_test::huge", x_);
  ASSERT_GT(result.numel(), std::int64_t{1} << 30);
  EXPECT_EQ(state(hooked, {x_}), EntryState::kNative);
  EXPECT_TRUE(runtime().wait_until_idle(60));
  EXPECT_TRUE(handler->requests().empty());
}

}  // namespace
}  // namespace eagercache
