#include "eagercache/deployed_module.h"

#include <new>
#include <string>
#include <utility>

#include "cpp_api/running_environment.h"
#include "cpp_api/settings.h"
#include "cpp_api/store_choice.h"
#include "dispatcher/deployed/deployed_program.h"
#include "dispatcher/deployed/program_device.h"

namespace eagercache {
namespace {

void refuse(const Status& status, DeployStatus* outcome) {
  outcome->code = status_code_name(status.code());
  outcome->reason = status.message();
}

Status no_module() { return {StatusCode::kNotFound, "no module was loaded"}; }

// What `body` returns; an exception of ATen's as a status.
template <typename Outcome, typename Body>
Outcome caught(const Body& body) {
  Outcome outcome;
  try {
    body(&outcome);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    refuse(Status(StatusCode::kUnsupported, error.what()), &outcome);
  }
  return outcome;
}

WeightSets::Which which(ConstantSet set) {
  return set == ConstantSet::kActive ? WeightSets::Which::kActive : WeightSets::Which::kInactive;
}

std::vector<TensorDescription> described(const std::vector<ProgramSpec::Tensor>& tensors) {
  std::vector<TensorDescription> rows;
  for (const ProgramSpec::Tensor& tensor : tensors) {
    rows.push_back({tensor.name, tensor.form.dtype, tensor.form.sizes});
  }
  return rows;
}

std::vector<std::string> names_of(const std::vector<TensorDescription>& tensors) {
  std::vector<std::string> names;
  for (const TensorDescription& tensor : tensors) {
    names.push_back(tensor.name);
  }
  return names;
}

constexpr std::string_view kind_name(ArtifactConstant::Kind kind) {
  switch (kind) {
    case ArtifactConstant::Kind::kParameter:
      return "parameter";
    case ArtifactConstant::Kind::kBuffer:
      return "buffer";
    case ArtifactConstant::Kind::kFolded:
      break;
  }
  return "folded";
}

}  // namespace

DeployedModule::Loaded DeployedModule::load(const std::filesystem::path& artifact,
                                            const LoadOptions& options) {
  return caught<Loaded>([&](Loaded* loaded) {
    if (const std::string problem = foreign_torch(); !problem.empty()) {
      return refuse(Status(StatusCode::kIncompatible, problem), loaded);
    }
    const Result<SigningRules> rules =
        read_signing_rules(artifact, options.trusted_keys, options.revoked);
    if (!rules) {
      return refuse(rules.status(), loaded);
    }
    DeployedProgram::Options chosen;
    chosen.copy = !options.map_weights;
    chosen.verify_weights = options.verify_weights;
    chosen.allow_untrusted = read_settings().allow_untrusted;
    chosen.runners = options.runners;
    chosen.device = options.device;
    chosen.environment = running_environment_text();
    Result<std::unique_ptr<DeployedProgram>> program =
        DeployedProgram::open(artifact, rules.value(), chosen);
    if (!program) {
      return refuse(program.status(), loaded);
    }
    loaded->module.program_ = std::move(program).value();
  });
}

RunResult DeployedModule::run_at(const std::vector<at::Tensor>& inputs, int place) const {
  return caught<RunResult>([&](RunResult* result) {
    if (program_ == nullptr) {
      return refuse(no_module(), result);
    }
    Result<DeployedProgram::Answer> answer =
        program_->run(inputs, static_cast<DeployedProgram::Place>(place));
    if (!answer) {
      return refuse(answer.status(), result);
    }
    result->outputs = std::move(answer->outputs);
    result->version = answer->version;
  });
}

RunResult DeployedModule::run(const std::vector<at::Tensor>& inputs) const {
  return run_at(inputs, static_cast<int>(DeployedProgram::Place::kWait));
}

RunResult DeployedModule::try_run(const std::vector<at::Tensor>& inputs) const {
  return run_at(inputs, static_cast<int>(DeployedProgram::Place::kTry));
}

RunResult DeployedModule::run_single_threaded(const std::vector<at::Tensor>& inputs) const {
  return run_at(inputs, static_cast<int>(DeployedProgram::Place::kNone));
}

at::Device DeployedModule::device() const {
  return program_ == nullptr ? at::Device(at::DeviceType::CPU) : program_->device();
}

std::vector<TensorDescription> DeployedModule::inputs() const {
  if (program_ == nullptr) {
    return {};
  }
  std::vector<TensorDescription> rows = described(program_->spec().inputs);
  for (const auto& [input, dimension] : program_->spec().open) {
    rows[input].sizes[dimension] = -1;
  }
  return rows;
}

std::vector<TensorDescription> DeployedModule::outputs() const {
  return program_ == nullptr ? std::vector<TensorDescription>()
                             : described(program_->spec().outputs);
}

std::vector<std::string> DeployedModule::input_names() const { return names_of(inputs()); }

std::vector<std::string> DeployedModule::output_names() const { return names_of(outputs()); }

std::string DeployedModule::input_spec() const {
  return program_ == nullptr ? std::string() : program_->spec().in_spec;
}

std::string DeployedModule::output_spec() const {
  return program_ == nullptr ? std::string() : program_->spec().out_spec;
}

std::vector<ConstantDescription> DeployedModule::constants() const {
  std::vector<ConstantDescription> rows;
  if (program_ == nullptr) {
    return rows;
  }
  for (const ConstantForm& constant : program_->weights().forms()) {
    rows.push_back({constant.names.front(),
                    {constant.names.begin() + 1, constant.names.end()},
                    std::string(kind_name(constant.kind)),
                    constant.form.dtype,
                    constant.form.sizes,
                    constant.form.strides});
  }
  return rows;
}

std::map<std::string, std::string> DeployedModule::facts() const {
  if (program_ == nullptr) {
    return {};
  }
  std::map<std::string, std::string> facts = program_->artifact()->header().facts;
  facts.erase("program");
  return facts;
}

std::string DeployedModule::signer() const {
  return program_ == nullptr ? std::string() : program_->artifact()->header().signer.hex();
}

ConstantValues DeployedModule::constant_values(ConstantSet set) const {
  return caught<ConstantValues>([&](ConstantValues* result) {
    if (program_ == nullptr) {
      return refuse(no_module(), result);
    }
    auto values = program_->weights().values(which(set), /*folded=*/false);
    if (!values) {
      return refuse(values.status(), result);
    }
    result->values = std::move(values).value();
  });
}

DeployStatus DeployedModule::update_constants(const std::map<std::string, at::Tensor>& values,
                                              const UpdateOptions& options) const {
  return caught<DeployStatus>([&](DeployStatus* outcome) {
    const Status status = program_ == nullptr
                              ? no_module()
                              : program_->weights().update(
                                    values, {which(options.set), options.whole, !options.copy});
    if (!status) refuse(status, outcome);
  });
}

DeployStatus DeployedModule::swap_constants() const {
  return caught<DeployStatus>([&](DeployStatus* outcome) {
    const Status status = program_ == nullptr ? no_module() : program_->weights().swap();
    if (!status) refuse(status, outcome);
  });
}

DeployStatus DeployedModule::fold_constants(ConstantSet set) const {
  return caught<DeployStatus>([&](DeployStatus* outcome) {
    const Status status = program_ == nullptr ? no_module() : program_->weights().fold(which(set));
    if (!status) refuse(status, outcome);
  });
}

void DeployedModule::drop_inactive_constants() const {
  if (program_ != nullptr) {
    program_->weights().drop_inactive();
  }
}

std::uint64_t DeployedModule::version(ConstantSet set) const {
  if (program_ == nullptr) {
    return 0;
  }
  return set == ConstantSet::kActive ? program_->weights().active()->version
                                     : program_->weights().inactive_version();
}

std::size_t DeployedModule::runners() const {
  return program_ == nullptr ? 0 : program_->runners();
}

bool DeployedModule::is_ready() const { return program_ != nullptr && program_->is_ready(); }

bool DeployedModule::wait_until_ready(double seconds) const {
  return program_ != nullptr && program_->wait_until_ready(seconds);
}

bool DeployedModule::wait_until_idle(double seconds) const {
  return program_ == nullptr || program_->wait_until_idle(seconds);
}

ArtifactCheck check_artifact(const std::filesystem::path& artifact,
                             const std::vector<std::filesystem::path>& trusted_keys,
                             const std::filesystem::path& revoked) {
  return caught<ArtifactCheck>([&](ArtifactCheck* check) {
    const Result<SigningRules> rules = read_signing_rules(artifact, trusted_keys, revoked);
    if (!rules) {
      return refuse(rules.status(), check);
    }
    const auto opened = ModuleArtifact::open(artifact, rules.value());
    if (!opened) {
      return refuse(opened.status(), check);
    }
    const ArtifactHeader& header = opened.value()->header();
    check->signer = header.signer.hex();
    check->digest = header.digest.hex();
    check->created = header.validity.created;
    check->expires = header.validity.expires;
    check->bytes = header.file_bytes;
    if (const Status status = opened.value()->verify(); !status) {
      return refuse(status, check);
    }
    std::string problem = DeployedProgram::unusable_here(header, running_environment_text());
    if (const auto device = program_device(DeployedProgram::gpu_of(header), std::nullopt);
        !device) {
      problem += (problem.empty() ? "" : "; ") + device.status().message();
    }
    if (!problem.empty()) {
      refuse(
          Status(StatusCode::kIncompatible, artifact.string() + " cannot be used here: " + problem),
          check);
    }
  });
}

}  // namespace eagercache
