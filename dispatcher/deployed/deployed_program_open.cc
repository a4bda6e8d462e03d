// A deployed module out of its artifact.
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "dispatcher/deployed/deployed_program.h"
#include "dispatcher/deployed/program_device.h"
#include "kernel_cache/base/cpu_features.h"
#include "kernel_cache/base/environment_fields.h"

namespace eagercache {

std::string DeployedProgram::gpu_of(const ArtifactHeader& header) {
  const auto fact = header.facts.find(kGpuFact);
  return fact == header.facts.end() ? std::string() : fact->second;
}

std::string DeployedProgram::unusable_here(const ArtifactHeader& header,
                                           const std::string& environment) {
  const EnvironmentFields theirs = parse_environment(header.environment);
  const EnvironmentFields ours = parse_environment(environment);
  if (theirs.empty()) {
    return "it does not say what it was made for; export it again";
  }
  EnvironmentFields checked = ours;
  checked.insert(theirs.begin(), theirs.end());
  std::string problem = environment_differences(checked, ours, theirs, "the artifact");
  if (const std::string feature = missing_cpu_feature(header.cpu_features, host_cpu_features());
      !feature.empty()) {
    problem += (problem.empty() ? "" : "; ") + std::string("this machine has no ") + feature;
  }
  return problem;
}

Result<std::unique_ptr<DeployedProgram>> DeployedProgram::open(const std::filesystem::path& path,
                                                               const SigningRules& rules,
                                                               const Options& options) {
  auto artifact = ModuleArtifact::open(path, rules);
  if (!artifact) {
    return artifact.status();
  }
  const ArtifactHeader& header = artifact.value()->header();
  if (const std::string problem = unusable_here(header, options.environment); !problem.empty()) {
    return Status(StatusCode::kIncompatible, path.string() + " cannot be used here: " + problem);
  }
  Parts parts;
  const Result<c10::Device> device = program_device(gpu_of(header), options.device);
  if (!device) {
    return Status(device.code(),
                  path.string() + " cannot be used here: " + device.status().message());
  }
  parts.device = device.value();
  const auto fact = header.facts.find("program");
  parts.program = fact == header.facts.end() ? std::string() : fact->second;
  parts.runners = options.runners;
  Result<std::vector<ConstantForm>> forms = constant_forms(header);
  if (!forms) {
    return forms.status();
  }
  parts.constants = std::move(forms).value();
  for (std::size_t i = 0; i < header.libraries.size(); ++i) {
    Result<std::filesystem::path> library = artifact.value()->verified_library(i);
    if (!library) {
      return library.status();
    }
    parts.libraries.push_back(std::move(library).value());
  }
  const auto memory =
      options.copy ? artifact.value()->copy_weights()
                   : artifact.value()->map_weights(options.verify_weights, options.allow_untrusted);
  if (!memory) {
    return memory.status();
  }
  const c10::InferenceMode no_inference(false);
  for (std::size_t i = 0; i < parts.constants.size(); ++i) {
    const LaunchPlan::Output& form = parts.constants[i].form;
    // Nobody writes them: what is given away is a copy.
    auto* const data =
        const_cast<std::byte*>(artifact.value()->bytes_of(*memory.value(), i).data());
    parts.values.push_back(at::from_blob(
        data, form.sizes, form.strides, [held = memory.value()](void* /*data*/) {},
        at::TensorOptions().dtype(form.dtype)));
  }
  Result<std::unique_ptr<DeployedProgram>> program = make(std::move(parts));
  if (!program) {
    return Status(program.code(), path.string() + ": " + program.status().message());
  }
  program.value()->artifact_ = std::move(artifact).value();
  return program;
}

}  // namespace eagercache
