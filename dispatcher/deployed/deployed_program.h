#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dispatcher/base/locks.h"
#include "dispatcher/deployed/program_spec.h"
#include "dispatcher/deployed/shared_container.h"
#include "dispatcher/deployed/weight_sets.h"
#include "kernel_cache/artifact/module_artifact.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// A module whose code was compiled, with its weights: it answers calls, from any number of threads,
// and its weights can be changed meanwhile. Needs neither the module nor Python.
class DeployedProgram {
 public:
  struct Parts {
    std::string program;  // see parse_program
    std::vector<ConstantForm> constants;
    std::vector<at::Tensor> values;                // one for each; folded ones may be undefined
    c10::Device device = c10::DeviceType::CPU;     // as program_device() tells it
    std::vector<std::filesystem::path> libraries;  // the main one, and the folding one if any
    std::size_t runners = 0;                       // 0: as many as there are processors
  };
  struct Options {
    bool copy = false;            // the weights into memory of our own, each verified
    bool verify_weights = false;  // where they are mapped: read and compare all of them
    bool allow_untrusted = false;
    std::size_t runners = 0;
    std::optional<c10::Device> device;  // see program_device
    std::string environment;            // of this process, as the artifact's: lines "field: value"
  };
  struct Answer {
    std::vector<at::Tensor> outputs;
    std::uint64_t version = 0;  // of the weights that it was computed with, all of it
  };
  enum class Place {
    kWait,  // waits for a free runner
    kTry,   // kBusy without a free one
    kNone,  // takes none: the caller limits how many calls there are
  };

  static Result<std::unique_ptr<DeployedProgram>> make(Parts parts);
  // kIncompatible names the fields of the environment that differ, the missing CPU feature, or the
  // GPU. As program_device() otherwise.
  static Result<std::unique_ptr<DeployedProgram>> open(const std::filesystem::path& path,
                                                       const SigningRules& rules,
                                                       const Options& options);

  // Why an artifact's code cannot run where `environment` is that of the process: that it does not
  // say what it was made for, the fields that differ or are missing on one side, and the missing
  // CPU feature; empty when it can.
  static std::string unusable_here(const ArtifactHeader& header, const std::string& environment);

  // The GPUs that an artifact's code is for (see program_device); empty for the CPU.
  static std::string gpu_of(const ArtifactHeader& header);

  // One call. Inputs are tensors on device(), of the dtypes and sizes of spec().inputs; other
  // strides are copied. Computes without gradients and outside of autocast, with one version of the
  // weights. On a GPU it gives work to the thread's current stream and waits for none of it.
  // kInvalidArgument for inputs that do not fit or, on the CPU, an index that is out of range;
  // kUnsupported while that stream is captured, since a graph would outlive the weights.
  Result<Answer> run(std::span<const at::Tensor> inputs, Place place);

  WeightSets& weights() noexcept { return weights_; }
  const ProgramSpec& spec() const noexcept { return spec_; }
  c10::Device device() const noexcept { return device_; }
  // nullptr for one that was made of parts.
  const std::shared_ptr<const ModuleArtifact>& artifact() const noexcept { return artifact_; }
  std::size_t runners() const noexcept { return runners_; }

  // Whether run() would find a free runner now.
  bool is_ready() const;
  // Waits until one is free; false when `seconds` passed.
  bool wait_until_ready(double seconds) const;
  // Waits until no call is under way.
  bool wait_until_idle(double seconds) const;

 private:
  class Turn;  // a call that is under way

  DeployedProgram(ProgramSpec spec, std::vector<ConstantForm> constants, c10::Device device,
                  std::size_t runners);
  Status load(const std::vector<std::filesystem::path>& libraries);
  Result<std::vector<at::Tensor>> prepare(std::span<const at::Tensor> inputs,
                                          std::vector<std::vector<std::int64_t>>* strides) const;
  Status check_thread() const;
  Status check_inputs(std::span<const at::Tensor> inputs) const;
  Status check_sizes(std::span<const at::Tensor> inputs,
                     std::vector<std::vector<std::int64_t>>* strides) const;
  Status fold(std::vector<at::Tensor>* values) const;

  const ProgramSpec spec_;
  const c10::Device device_;
  const std::size_t runners_;
  std::vector<std::vector<bool>> open_;                    // for each input and dimension
  std::vector<std::vector<std::int64_t>> output_strides_;  // where no size is open
  WeightSets weights_;
  SharedContainer* main_ = nullptr;
  SharedContainer* fold_ = nullptr;
  ProgramShapeFunction shape_ = nullptr;
  std::shared_ptr<const ModuleArtifact> artifact_;

  mutable Mutex turns_mutex_;                                    // held for moments
  std::size_t running_ EAGERCACHE_GUARDED_BY(turns_mutex_) = 0;  // calls under way
  std::size_t taken_ EAGERCACHE_GUARDED_BY(turns_mutex_) = 0;    // runners that have one
  mutable std::condition_variable freed_;
  mutable std::condition_variable ended_;
};

}  // namespace eagercache
