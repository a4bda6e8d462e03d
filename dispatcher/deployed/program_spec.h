#pragma once

// What the header of an artifact says about its program, read once. Plain data, never changed
// afterwards: any thread may read it.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dispatcher/plans/launch_plan.h"
#include "kernel_cache/artifact/module_artifact.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// What a deployed module's main function takes and gives, and how its constants reach it.
struct ProgramSpec {
  struct Tensor {
    std::string name;
    LaunchPlan::Output form;  // of an input with open sizes: one example of them
  };
  // Where an input of the main function comes from.
  struct Source {
    bool constant = false;  // a row of the constants; else an input of the call
    std::size_t index = 0;
  };
  // An integer tensor whose values are used as indices: they must be in [low, high).
  struct IndexRange {
    Source of;
    std::int64_t low = 0;
    std::int64_t high = 0;
  };

  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::vector<Source> main;
  // The folding function, if there is one, takes these constants and gives those.
  std::vector<std::size_t> fold_inputs;
  std::vector<std::size_t> folded;
  std::vector<IndexRange> ranges;
  // Sizes that are open: (input, dimension), ascending. The main library's function kShapeFunction
  // says whether it holds for such sizes, and the outputs' strides.
  std::vector<std::pair<std::size_t, std::size_t>> open;
  // How Python's arguments and answer are made of the tensors; opaque here.
  std::string in_spec;
  std::string out_spec;
};

// A constant as a deployed module knows it.
struct ConstantForm {
  std::vector<std::string> names;  // one at least
  ArtifactConstant::Kind kind = ArtifactConstant::Kind::kParameter;
  LaunchPlan::Output form;

  bool folded() const noexcept { return kind == ArtifactConstant::Kind::kFolded; }
};

// A function of the main library: 0 when it holds for the open `sizes`; `strides` then gets those
// of all outputs, one after the other.
using ProgramShapeFunction = std::int32_t (*)(const std::int64_t* sizes, std::int64_t* strides);
inline constexpr const char* kShapeFunction = "eagercache_module_shape";

// The program that a fact's text stands for, over `constants`. kCorrupt for anything but canonical
// JSON of exactly the known fields with every index in range; kIncompatible for another version.
Result<ProgramSpec> parse_program(std::string_view text,
                                  const std::vector<ConstantForm>& constants);

// Constants by what is said of them. kCorrupt where one is no tensor.
Result<std::vector<ConstantForm>> described_constants(
    const std::vector<ArtifactConstant>& constants);
// An artifact's constants. kCorrupt where one has other bytes than it needs, too.
Result<std::vector<ConstantForm>> constant_forms(const ArtifactHeader& header);

// Bytes between the first and behind the last element.
std::uint64_t extent_bytes(const LaunchPlan::Output& form) noexcept;

// "[2, 3]"
std::string sizes_text(at::IntArrayRef numbers);

}  // namespace eagercache
