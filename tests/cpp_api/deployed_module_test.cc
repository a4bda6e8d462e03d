// Deployed modules as a program without Python sees them: every function of the header, good and
// bad input, and updates under load. Over the artifact of make_artifact.py.

#include "eagercache/deployed_module.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

const std::filesystem::path kFolder = EAGERCACHE_TEST_ARTIFACT;

// With every constant v, the answer to ones is (8 v + v + 2 v) v; a mixture of versions gives
// another number.
float answer_for(float value) { return 11 * value * value; }

std::map<std::string, at::Tensor> state(float value) {
  return {{"first.weight", at::full({4, 8}, value)},
          {"first.bias", at::full({4}, value)},
          {"scale", at::full({4}, value)},
          {"shift", at::full({4}, value)}};
}

class DeployedModuleTest : public testing::Test {
 protected:
  DeployedModuleTest() { options_.trusted_keys = {kFolder / "own.pub"}; }

  DeployedModule load() const {
    DeployedModule::Loaded loaded = DeployedModule::load(kFolder / "module", options_);
    if (!loaded) throw std::runtime_error(loaded.reason);
    return loaded.module;
  }
  static void expect_answer(const RunResult& result, float value) {
    ASSERT_TRUE(result) << result.reason;
    ASSERT_EQ(result.outputs.size(), 1U);
    EXPECT_TRUE(result.outputs[0].eq(answer_for(value)).all().item<bool>())
        << result.outputs[0] << " of version " << result.version;
  }
  static void expect_refused(const DeployStatus& status, const std::string& code,
                             const std::string& text) {
    EXPECT_FALSE(status);
    EXPECT_EQ(status.code, code) << status.reason;
    EXPECT_NE(status.reason.find(text), std::string::npos) << status.reason;
    EXPECT_EQ(status.reason.find('\n'), std::string::npos);
  }

  LoadOptions options_;
  const std::vector<at::Tensor> ones_ = {at::ones({2, 8})};
};

TEST_F(DeployedModuleTest, MappedCopiedAndVerifiedWeightsAnswer) {
  for (int way = 0; way < 3; ++way) {
    options_.map_weights = way != 1;
    options_.verify_weights = way == 2;
    const DeployedModule module = load();
    ASSERT_TRUE(module);
    expect_answer(module.run(ones_), 1);
    expect_answer(module.run_single_threaded(ones_), 1);
    expect_answer(module.try_run(ones_), 1);
    const RunResult longer = module.run({at::ones({77, 8})});
    expect_answer(longer, 1);
    EXPECT_EQ(longer.outputs[0].size(0), 77);
    EXPECT_FALSE(longer.outputs[0].requires_grad());
  }
}

TEST_F(DeployedModuleTest, RunsOnTheDeviceThatItWasExportedOn) {
  options_.device = at::Device(at::kCPU);
  EXPECT_EQ(load().device(), at::Device(at::kCPU));
  EXPECT_EQ(DeployedModule().device(), at::Device(at::kCPU));
  options_.device = at::Device(at::kCUDA, 0);
  expect_refused(DeployedModule::load(kFolder / "module", options_), "invalid_argument",
                 "exported on the CPU and cannot run on cuda:0");
}

TEST_F(DeployedModuleTest, SaysWhatItTakesGivesAndHolds) {
  const DeployedModule module = load();
  EXPECT_EQ(module.input_names(), std::vector<std::string>{"x"});
  EXPECT_EQ(module.output_names(), std::vector<std::string>{"output"});
  EXPECT_EQ(module.inputs()[0].sizes, (std::vector<std::int64_t>{-1, 8}));
  EXPECT_EQ(module.inputs()[0].dtype, at::kFloat);
  EXPECT_EQ(module.outputs()[0].sizes, (std::vector<std::int64_t>{2, 4}));
  EXPECT_NE(module.input_spec().find("\"tensor\": 0"), std::string::npos);
  EXPECT_NE(module.output_spec().find("\"tensor\": 0"), std::string::npos);
  const std::vector<ConstantDescription> constants = module.constants();
  ASSERT_EQ(constants.size(), 5U);
  EXPECT_EQ(constants[4].kind, "folded");
  bool buffer = false;
  for (const ConstantDescription& constant : constants) {
    if (constant.name == "first.weight") {
      EXPECT_EQ(constant.kind, "parameter");
      EXPECT_EQ(constant.sizes, (std::vector<std::int64_t>{4, 8}));
      EXPECT_EQ(constant.strides, (std::vector<std::int64_t>{8, 1}));
      EXPECT_EQ(constant.dtype, at::kFloat);
    }
    buffer = buffer || (constant.name == "shift" && constant.kind == "buffer");
  }
  EXPECT_TRUE(buffer);
  EXPECT_EQ(module.facts().at("threads"), "1");
  EXPECT_FALSE(module.facts().contains("program"));
  EXPECT_EQ(module.signer().size(), 64U);
}

TEST_F(DeployedModuleTest, ConstantsAreUpdatedSwappedFoldedAndDropped) {
  const DeployedModule module = load();
  expect_refused(module.swap_constants(), "not_found", "inactive");
  ASSERT_TRUE(module.update_constants(state(2), {ConstantSet::kInactive, true, true}));
  expect_answer(module.run(ones_), 1);
  EXPECT_EQ(module.version(), 1U);
  EXPECT_EQ(module.version(ConstantSet::kInactive), 2U);
  ASSERT_TRUE(module.fold_constants(ConstantSet::kInactive));
  ASSERT_TRUE(module.swap_constants());
  expect_answer(module.run(ones_), 2);
  EXPECT_EQ(module.version(), 2U);
  ASSERT_TRUE(module.swap_constants());
  expect_answer(module.run(ones_), 1);
  module.drop_inactive_constants();
  EXPECT_EQ(module.version(ConstantSet::kInactive), 0U);

  ASSERT_TRUE(module.update_constants(state(3)));
  expect_answer(module.run(ones_), 3);
  const ConstantValues values = module.constant_values();
  ASSERT_TRUE(values) << values.reason;
  EXPECT_EQ(values.values.size(), 4U);
  EXPECT_TRUE(values.values.at("shift").eq(3).all().item<bool>());
  expect_refused(module.constant_values(ConstantSet::kInactive), "not_found", "inactive");

  // Tensors that are kept are read where they are.
  const auto kept = state(4);
  ASSERT_TRUE(module.update_constants(kept, {ConstantSet::kActive, true, false}));
  for (const auto& [name, value] : kept) value.fill_(5);
  ASSERT_TRUE(module.fold_constants());
  expect_answer(module.run(ones_), 5);
}

TEST_F(DeployedModuleTest, WrongInputsAndConstantsChangeNothing) {
  const DeployedModule module = load();
  expect_refused(module.run({}), "invalid_argument", "takes 1 tensors, not 0");
  expect_refused(module.run({at::Tensor()}), "invalid_argument", "no plain tensor");
  expect_refused(module.run({at::ones({2, 7})}), "invalid_argument", "[2, 7]");
  expect_refused(module.run({at::ones({1, 8})}), "invalid_argument", "open sizes [1]");
  expect_refused(module.run({at::ones({2, 8}, at::kDouble)}), "invalid_argument", "Double");
  expect_refused(module.update_constants({{"nothing", at::ones({1})}}), "invalid_argument",
                 "there is no constant nothing");
  expect_refused(module.update_constants({{"scale", at::ones({5})}}), "invalid_argument", "[5]");
  expect_refused(module.update_constants({{"scale", at::ones({4}, at::kInt)}}), "invalid_argument",
                 "Int");
  expect_refused(module.update_constants({{"folded.0", at::ones({4})}}), "invalid_argument",
                 "folded");
  expect_refused(
      module.update_constants({{"scale", at::ones({4})}}, {ConstantSet::kActive, true, true}),
      "invalid_argument", "was not given");
  EXPECT_EQ(module.version(), 1U);
  expect_answer(module.run(ones_), 1);
}

TEST_F(DeployedModuleTest, WhatCannotBeUsedIsRefused) {
  const auto refused = [&](const std::filesystem::path& path, const std::string& code,
                           const std::string& text) {
    const DeployedModule::Loaded loaded = DeployedModule::load(path, options_);
    expect_refused(loaded, code, text);
    EXPECT_FALSE(loaded.module);
    expect_refused(check_artifact(path, options_.trusted_keys), code, text);
  };
  const TemporaryDirectory directory;
  const std::filesystem::path copy = directory.path() / "module";
  refused(directory.path() / "nothing", "not_found", "nothing");
  std::ifstream file(kFolder / "module", std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::ofstream(copy, std::ios::binary) << bytes.substr(0, bytes.size() - 1);
  refused(copy, "corrupt", "bytes, not");
  bytes[200] = static_cast<char>(bytes[200] ^ 1);
  std::ofstream(copy, std::ios::binary) << bytes;
  refused(copy, "refused", "altered or cut off");
  options_.trusted_keys = {kFolder / "other.pub"};
  refused(kFolder / "module", "refused", "not among those that are trusted");
  options_.trusted_keys.clear();
  refused(kFolder / "module", "invalid_argument", "no key is trusted");

  const ArtifactCheck check = check_artifact(kFolder / "module", {kFolder / "own.pub"});
  EXPECT_TRUE(check) << check.reason;
  EXPECT_EQ(check.bytes, std::filesystem::file_size(kFolder / "module"));
  EXPECT_EQ(check.signer.size(), 64U);
  EXPECT_GT(check.created, 0);
  EXPECT_EQ(check.expires, 0);

  const std::filesystem::path list = directory.path() / "revoked";
  options_.trusted_keys = {kFolder / "own.pub"};
  for (const std::string& id : {check.signer, check.digest}) {
    std::ofstream(list) << id << " lost\n";
    options_.revoked = list;
    expect_refused(DeployedModule::load(kFolder / "module", options_), "refused", "is revoked");
    options_.revoked.clear();
    ::setenv("EAGERCACHE_REVOKED", list.c_str(), 1);
    refused(kFolder / "module", "refused", "is revoked");
    ::unsetenv("EAGERCACHE_REVOKED");
  }
  options_.revoked = directory.path() / "nothing";
  expect_refused(DeployedModule::load(kFolder / "module", options_), "refused", "cannot be read");
}

TEST_F(DeployedModuleTest, NoModuleAnswersNothing) {
  const DeployedModule none;
  EXPECT_FALSE(none);
  expect_refused(none.run(ones_), "not_found", "no module");
  expect_refused(none.update_constants({}), "not_found", "no module");
  expect_refused(none.swap_constants(), "not_found", "no module");
  expect_refused(none.fold_constants(), "not_found", "no module");
  expect_refused(none.constant_values(), "not_found", "no module");
  none.drop_inactive_constants();
  EXPECT_TRUE(none.inputs().empty() && none.outputs().empty() && none.constants().empty());
  EXPECT_TRUE(none.facts().empty() && none.signer().empty() && none.input_spec().empty());
  EXPECT_FALSE(none.is_ready());
  EXPECT_FALSE(none.wait_until_ready(0));
  EXPECT_TRUE(none.wait_until_idle(0));
  EXPECT_EQ(none.version() + none.runners(), 0U);
}

TEST_F(DeployedModuleTest, EveryAnswerIsOfOneWholeVersionUnderFourThreads) {
  constexpr int kSwaps = 1000;
  const auto value_of = [](std::uint64_t version) {
    return static_cast<float>(version == 1 ? 1 : version % 61 + 1);
  };
  options_.runners = 3;
  const DeployedModule module = load();
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> answers{0};
  std::atomic<std::uint64_t> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        const RunResult result = module.run(ones_);
        const bool right =
            result && result.outputs[0].eq(answer_for(value_of(result.version))).all().item<bool>();
        wrong += right ? 0 : 1;
        ++answers;
      }
    });
  }
  for (std::uint64_t version = 2; version < 2 + kSwaps; ++version) {
    const UpdateOptions inactive{ConstantSet::kInactive, true, true};
    ASSERT_TRUE(module.update_constants(state(value_of(version)), inactive));
    ASSERT_TRUE(module.swap_constants());
    ASSERT_EQ(module.version(), version);
  }
  for (const std::uint64_t before = answers; answers < before + 8;) std::this_thread::yield();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0U) << "of " << answers;
  EXPECT_TRUE(module.wait_until_idle(10));
}

TEST_F(DeployedModuleTest, ARunnerIsWaitedForOrSaidToBeBusy) {
  options_.runners = 1;
  const DeployedModule module = load();
  EXPECT_EQ(module.runners(), 1U);
  EXPECT_TRUE(module.is_ready());
  EXPECT_TRUE(module.wait_until_ready(0));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      const std::vector<at::Tensor> large = {at::ones({200'000, 8})};
      while (!stop) expect_answer(module.run(large), 1);
    });
  }
  RunResult result;
  do {
    result = module.try_run(ones_);
  } while (result);
  expect_refused(result, "busy", "runners");
  expect_answer(module.run_single_threaded(ones_), 1);
  expect_answer(module.run(ones_), 1);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(module.wait_until_idle(10));
  EXPECT_TRUE(module.is_ready());
}

}  // namespace
}  // namespace eagercache
