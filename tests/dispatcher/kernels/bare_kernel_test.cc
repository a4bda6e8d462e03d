// A launch plan executed, and a bare kernel out of the store.

#include "dispatcher/kernels/bare_kernel.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatcher/kernels/kernel_forms.h"
#include "dispatcher/memory/large_blocks.h"
#include "dispatcher/plans/contract.h"
#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

constexpr const char* kTwicePlan =
    R"({"entry":"eagercache_kernel_2a","inputs":1,)"
    R"("outputs":[{"dtype":"float32","sizes":[5],"strides":[1]}],"scratch":[20],"version":2,"writes":[]})";

constexpr const char* kScalarPlan =
    R"({"plan":{"entry":"eagercache_kernel_2e","inputs":1,)"
    R"("outputs":[{"dtype":"float32","sizes":[5],"strides":[1]}],"scratch":[],"version":2,"writes":[]},)"
    R"("scalars":2,"version":1})";

std::unique_ptr<LoadedKernel> load(const std::string& plan, const char* form = "bare") {
  Result<SharedLibrary> library = SharedLibrary::open(EAGERCACHE_TEST_BARE_OBJECT);
  if (!library) {
    throw std::runtime_error(library.status().to_string());
  }
  auto kernel = make_kernel(library.value(), c10::Device("cpu"), {form, plan, {}});
  if (!kernel) {
    throw std::runtime_error(kernel.status().to_string());
  }
  return std::move(kernel).value();
}

TEST(BareKernel, AnswersWithATensorOfThePlansMetadata) {
  const auto kernel = load(kTwicePlan);
  const at::Tensor x = at::arange(5, at::kFloat);
  const at::Tensor* const input = &x;
  std::array<at::Tensor, 1> outputs;
  ASSERT_EQ(kernel->run({&input, 1}, outputs, x.device()), LoadedKernel::Outcome::kAnswered);
  EXPECT_TRUE(at::equal(outputs[0], x + x));
  EXPECT_EQ(outputs[0].strides(), at::IntArrayRef({1}));
  EXPECT_EQ(outputs[0].storage().nbytes(), 20U);
  EXPECT_FALSE(outputs[0].is_inference());
}

TEST(BareKernel, MakesInferenceTensorsInInferenceMode) {
  const auto kernel = load(kTwicePlan);
  const c10::InferenceMode mode;
  const at::Tensor x = at::ones({5});
  const at::Tensor* const input = &x;
  std::array<at::Tensor, 1> outputs;
  ASSERT_EQ(kernel->run({&input, 1}, outputs, x.device()), LoadedKernel::Outcome::kAnswered);
  EXPECT_TRUE(outputs[0].is_inference());
}

TEST(BareKernel, GetsScratchThatIsAlignedAndApart) {
  const auto kernel = load(
      R"({"entry":"eagercache_kernel_2b","inputs":0,)"
      R"("outputs":[{"dtype":"int64","sizes":[3,2],"strides":[1,3]},)"
      R"({"dtype":"int64","sizes":[6],"strides":[1]}],"scratch":[100000,8],"version":2,"writes":[]})");
  std::array<at::Tensor, 2> outputs;
  ASSERT_EQ(kernel->run({}, outputs, c10::Device("cpu")), LoadedKernel::Outcome::kAnswered);
  EXPECT_EQ(outputs[0].strides(), at::IntArrayRef({1, 3}));
  EXPECT_EQ(outputs[0].abs().max().item<std::int64_t>(), 0);
  EXPECT_GE(outputs[1].min().item<std::int64_t>(), 100'000);
}

TEST(BareKernel, KeepsLargeScratchForTheNextRun) {
  const auto kernel = load(
      R"({"entry":"eagercache_kernel_2b","inputs":0,)"
      R"("outputs":[{"dtype":"int64","sizes":[6],"strides":[1]},)"
      R"({"dtype":"int64","sizes":[6],"strides":[1]}],"scratch":[100000,8],"version":2,"writes":[]})");
  { const WithoutKeptBlocks none; }
  std::array<at::Tensor, 2> outputs;
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(kernel->run({}, outputs, c10::Device("cpu")), LoadedKernel::Outcome::kAnswered);
    EXPECT_GE(kept_by_thread(), 100'008U);
    EXPECT_LT(kept_by_thread(), 200'016U);  // each run had the same
  }
}

TEST(BareKernel, TakesNumbersOfTheCall) {
  const auto kernel = load(kScalarPlan, "scalars");
  auto& bare = dynamic_cast<BareKernel&>(*kernel);
  ASSERT_EQ(bare.num_scalars(), 2U);
  const at::Tensor x = at::arange(5, at::kFloat);
  const at::Tensor* const input = &x;
  std::array<at::Tensor, 1> outputs;
  for (const double factor : {0.25, -3.0}) {
    const std::array<double, 2> numbers{factor, 7};
    BareKernel::WithScalars with(bare, numbers);
    ASSERT_EQ(with.answer({&input, 1}, outputs, x.device()), LoadedKernel::Outcome::kAnswered);
    EXPECT_TRUE(at::equal(outputs[0], x * factor + 7));
  }
  EXPECT_EQ(kernel->run({&input, 1}, outputs, x.device()), LoadedKernel::Outcome::kNotStarted);
  const std::array<double, 1> one{1.0};
  BareKernel::WithScalars too_few(bare, one);
  EXPECT_EQ(too_few.run({&input, 1}, outputs, x.device()), LoadedKernel::Outcome::kNotStarted);
}

TEST(BareKernel, FirstRunWithNumbersIsWatched) {
  const auto kernel = load(kScalarPlan, "scalars");
  std::vector<bool> seen;
  kernel->watch_first_run([&](bool begins) { seen.push_back(begins); });
  const at::Tensor x = at::ones({5});
  const at::Tensor* const input = &x;
  std::array<at::Tensor, 1> outputs;
  const std::array<double, 2> numbers{1, 1};
  for (int i = 0; i < 2; ++i) {
    BareKernel::WithScalars with(dynamic_cast<BareKernel&>(*kernel), numbers);
    with.answer({&input, 1}, outputs, x.device());
  }
  EXPECT_EQ(seen, (std::vector<bool>{true, false}));
}

TEST(ScalarPlan, AnythingButTheCanonicalTextIsRefused) {
  const std::string plan = kScalarPlan;
  EXPECT_TRUE(parse_scalar_plan(plan));
  EXPECT_EQ(parse_scalar_plan(plan + " ").code(), StatusCode::kCorrupt);
  const auto with = [&](const std::string& old, const std::string& by) {
    std::string changed = plan;
    return parse_scalar_plan(changed.replace(changed.rfind(old), old.size(), by)).code();
  };
  EXPECT_EQ(with("\"scalars\":2", "\"scalars\":0"), StatusCode::kCorrupt);
  EXPECT_EQ(with("\"scalars\":2", "\"scalars\":513"), StatusCode::kCorrupt);
  EXPECT_EQ(with("\"version\":1", "\"version\":2"), StatusCode::kIncompatible);
  EXPECT_EQ(with("\"inputs\":1", "\"inputs\":-1"), StatusCode::kCorrupt);
}

TEST(BareKernel, WritesTheInputsThatItsPlanNames) {
  const auto kernel = load(R"({"entry":"eagercache_kernel_2c","inputs":2,"outputs":[],)"
                           R"("scratch":[],"version":2,"writes":[1]})");
  EXPECT_TRUE(kernel->writes_inputs());
  EXPECT_EQ(kernel->num_outputs(), 0U);
  const at::Tensor x = at::arange(5, at::kFloat);
  const at::Tensor y = at::ones({5});
  const void* const memory = y.const_data_ptr();
  const at::Tensor* const inputs[] = {&x, &y};
  ASSERT_EQ(kernel->run(inputs, {}, x.device()), LoadedKernel::Outcome::kAnswered);
  EXPECT_TRUE(at::equal(y, x + 1));
  EXPECT_TRUE(at::equal(x, at::arange(5, at::kFloat)));
  EXPECT_EQ(y.const_data_ptr(), memory);
}

TEST(BareKernel, LeavesTheOtherOwnersOfCopyOnWriteMemoryTheirValues) {
  const auto kernel = load(R"({"entry":"eagercache_kernel_2c","inputs":2,"outputs":[],)"
                           R"("scratch":[],"version":2,"writes":[1]})");
  const at::Tensor x = at::ones({5});
  const at::Tensor y = at::ones({5});
  const at::Tensor clone = at::_lazy_clone(y);
  const at::Tensor* const inputs[] = {&x, &y};
  ASSERT_EQ(kernel->run(inputs, {}, x.device()), LoadedKernel::Outcome::kAnswered);
  EXPECT_TRUE(at::equal(y, x + 1));
  EXPECT_TRUE(at::equal(clone, x));
}

TEST(BareKernel, TakesMoreTensorsThanAStackHoldsPointersFor) {
  const auto kernel = load(R"({"entry":"eagercache_kernel_2d","inputs":200,"outputs":[],)"
                           R"("scratch":[64],"version":2,"writes":[199]})");
  std::vector<at::Tensor> tensors;
  std::vector<const at::Tensor*> inputs;
  for (int i = 0; i < 200; ++i) {
    tensors.push_back(at::full({1}, i, at::kFloat));
  }
  for (const at::Tensor& tensor : tensors) {
    inputs.push_back(&tensor);
  }
  ASSERT_EQ(kernel->run(inputs, {}, c10::Device("cpu")), LoadedKernel::Outcome::kAnswered);
  EXPECT_EQ(tensors.back().item<float>(), 199 * 198 / 2);
}

TEST(BareKernel, GivenAnotherNumberOfTensorsHasNotStarted) {
  const auto kernel = load(kTwicePlan);
  std::array<at::Tensor, 1> outputs;
  EXPECT_EQ(kernel->run({}, outputs, c10::Device("cpu")), LoadedKernel::Outcome::kNotStarted);
}

TEST(BareKernel, ThatReportsAnErrorHasFailed) {
  const auto kernel = load(
      R"({"entry":"eagercache_kernel_fa","inputs":0,)"
      R"("outputs":[{"dtype":"float32","sizes":[],"strides":[]}],"scratch":[],"version":2,"writes":[]})");
  std::array<at::Tensor, 1> outputs;
  EXPECT_EQ(kernel->run({}, outputs, c10::Device("cpu")), LoadedKernel::Outcome::kFailed);
}

TEST(BareKernel, ThatLeavesTheCallHasNotStarted) {
  const auto kernel = load(
      R"({"entry":"eagercache_kernel_fb","inputs":0,)"
      R"("outputs":[{"dtype":"float32","sizes":[],"strides":[]}],"scratch":[],"version":2,"writes":[]})");
  std::array<at::Tensor, 1> outputs;
  EXPECT_EQ(kernel->run({}, outputs, c10::Device("cpu")), LoadedKernel::Outcome::kNotStarted);
}

TEST(BareKernel, WhoseEntryIsMissingIsIncompatible) {
  Result<SharedLibrary> library = SharedLibrary::open(EAGERCACHE_TEST_BARE_OBJECT);
  ASSERT_TRUE(library);
  std::string plan = kTwicePlan;
  plan.replace(plan.find("_2a"), 3, "_99");
  const auto kernel = make_kernel(library.value(), c10::Device("cpu"), {"bare", plan, {}});
  EXPECT_EQ(kernel.code(), StatusCode::kIncompatible);
  EXPECT_EQ(make_kernel(library.value(), c10::Device("cuda:0"), {"bare", kTwicePlan, {}}).code(),
            StatusCode::kIncompatible);
  EXPECT_EQ(make_kernel(library.value(), c10::Device("cpu"), {"other", kTwicePlan, {}}).code(),
            StatusCode::kIncompatible);
}

class StoredBareKernelTest : public HookTest {
 protected:
  Manifest entry(const std::string& plan) const {
    Manifest manifest;
    manifest.key = digest(twice_, {x_});
    manifest.kind = EntryKind::kKernel;
    manifest.facts = {{"form", "bare"}, {"launch_plan", plan}, {"numerics", "bitwise"}};
    return manifest;
  }

  at::Tensor call_twice() const { return call("eagercache_test::twice", x_); }

  // Publishes `manifest` over an object that was made for `made`.
  void publish(DiskStore& store, const Manifest& manifest, const Manifest& made) const {
    const std::filesystem::path object =
        object_made_for(made, EAGERCACHE_TEST_BARE_OBJECT, folder_.path() / "kernel.so");
    ASSERT_TRUE(store.publish(manifest, {{ObjectKind::kSharedObject, object}}));
    runtime().set_policy(runtime().policy());  // the next call asks the store
  }

  // Native answers, and the entry is put aside.
  void expect_refused(DiskStore& store) const {
    const int before = native_runs("twice");
    EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
    EXPECT_EQ(native_runs("twice"), before + 1);
    EXPECT_EQ(store.find(digest(twice_, {x_})).code(), StatusCode::kNotFound);
  }

  const TemporaryDirectory folder_;
  const at::Tensor x_ = at::arange(5, at::kFloat) + 1;
  OperatorHook& twice_ = hook("eagercache_test::twice");
};

TEST_F(StoredBareKernelTest, AnswersInNativesPlace) {
  const auto store = use_store();
  publish(*store, entry(kTwicePlan), entry(kTwicePlan));
  const int before = native_runs("twice");
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  EXPECT_EQ(native_runs("twice"), before);
}

TEST_F(StoredBareKernelTest, WithABadPlanIsQuarantinedAndNativeAnswers) {
  const auto store = use_store();
  const Manifest bad = entry(R"({"entry":"system"})");
  publish(*store, bad, bad);
  expect_refused(*store);
}

// Each is a sound plan by itself; the code would read or write beyond what it is given.
TEST_F(StoredBareKernelTest, CalledOtherwiseThanItsObjectSaysIsRefused) {
  for (const auto& [from, to] : {std::pair{"\"scratch\":[20]", "\"scratch\":[1]"},
                                 std::pair{"\"scratch\":[20]", "\"scratch\":[]"},
                                 std::pair{"\"sizes\":[5]", "\"sizes\":[4]"},
                                 std::pair{"\"strides\":[1]", "\"strides\":[2]"},
                                 std::pair{"float32", "uint8"}, std::pair{"_2a", "_2c"}}) {
    const auto store = use_store();
    std::string plan = kTwicePlan;
    plan.replace(plan.find(from), std::string(from).size(), to);
    publish(*store, entry(plan), entry(kTwicePlan));
    expect_refused(*store);
  }
}

TEST_F(StoredBareKernelTest, MadeForAnotherEntryIsRefused) {
  const auto store = use_store();
  Manifest other = entry(kTwicePlan);
  other.key = digest(twice_, {at::ones({7})});
  publish(*store, entry(kTwicePlan), other);
  expect_refused(*store);
  other = entry(kTwicePlan);
  other.cpu_features = {"avx2"};
  publish(*store, entry(kTwicePlan), other);
  expect_refused(*store);
}

TEST_F(StoredBareKernelTest, LoadedForOneEntryIsNotUsedForAnother) {
  const auto store = use_store();
  publish(*store, entry(kTwicePlan), entry(kTwicePlan));
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  const at::Tensor four = at::ones({4});
  Manifest other = entry(kTwicePlan);
  other.key = digest(twice_, {four});
  ASSERT_TRUE(store->publish(other, {{ObjectKind::kSharedObject, folder_.path() / "kernel.so"}}));
  const int before = native_runs("twice");
  EXPECT_TRUE(at::equal(call("eagercache_test::twice", four), four + four));
  EXPECT_EQ(native_runs("twice"), before + 1);
  EXPECT_EQ(store->find(other.key).code(), StatusCode::kNotFound);
}

TEST_F(StoredBareKernelTest, WhoseObjectDoesNotSayWhatItIsForIsRefused) {
  const auto store = use_store();
  ASSERT_TRUE(store->publish(entry(kTwicePlan),
                             {{ObjectKind::kSharedObject, EAGERCACHE_TEST_BARE_OBJECT}}));
  expect_refused(*store);
  ASSERT_TRUE(store->publish(entry(kTwicePlan),
                             {{ObjectKind::kSharedObject, EAGERCACHE_TEST_CONTAINER_OBJECT}}));
  runtime().set_policy(runtime().policy());
  expect_refused(*store);
}

TEST(Contract, OfAKernelForManySizesHoldsWhateverItIsChosenFor) {
  const Digest key = sha256("key");
  const auto of = [&](const std::string& plan) {
    return contract_of(key, {"shapes", plan, ""}, {"avx2", "fma"});
  };
  EXPECT_EQ(of(R"({"choice":[[8,true]],"inputs":1})"), of(R"({"choice":[],"inputs":1})"));
  EXPECT_NE(of(R"({"choice":[],"inputs":2})"), of(R"({"choice":[],"inputs":1})"));
  EXPECT_NE(of("[]"), of("{}"));
  EXPECT_NE(contract_of(key, {"bare", R"({"choice":[]})", ""}, {}),
            contract_of(key, {"bare", R"({"choice":[1]})", ""}, {}));
}

TEST(Contract, IsALineOfTheText) {
  const Digest one = sha256("one");
  const Digest two = sha256("two");
  const std::string text = one.hex() + "\n" + two.hex() + "\n";
  EXPECT_TRUE(check_contract(text, one));
  EXPECT_TRUE(check_contract(text, two));
  for (const std::string& other :
       {std::string(), text.substr(1), text.substr(0, 64), "x" + text, one.hex() + two.hex()}) {
    EXPECT_EQ(check_contract(other, two).code(), StatusCode::kCorrupt) << other;
  }
  EXPECT_EQ(check_contract(text, sha256("three")).code(), StatusCode::kCorrupt);
  EXPECT_EQ(made_for(nullptr), "");
}

TEST_F(StoredBareKernelTest, WithAnotherNumberOfTensorsIsNotUsed) {
  const auto store = use_store();
  std::string plan = kTwicePlan;
  plan.replace(plan.find("\"inputs\":1"), 10, "\"inputs\":2");
  publish(*store, entry(plan), entry(plan));
  const int before = native_runs("twice");
  EXPECT_TRUE(at::equal(call_twice(), x_ + x_));
  EXPECT_EQ(native_runs("twice"), before + 1);
}

}  // namespace
}  // namespace eagercache
