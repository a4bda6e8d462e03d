#include "python_hooks/bindings/deploy_binding.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dispatcher/deployed/deployed_program.h"
#include "dispatcher/deployed/program_device.h"
#include "dispatcher/plans/plan_fields.h"
#include "kernel_cache/artifact/module_artifact.h"
#include "python_hooks/bindings/store_binding.h"
#include "python_hooks/bindings/without_gil.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// (names, kind, dtype, sizes, strides)
using ConstantRow = std::tuple<std::vector<std::string>, int, std::string,
                               std::vector<std::uint64_t>, std::vector<std::uint64_t>>;

template <typename T>
T taken(Result<T> result) {
  if (!result) {
    throw_store_error(result.status());
  }
  return std::move(result).value();
}

void require_ok(const Status& status) {
  if (!status) {
    throw_store_error(status);
  }
}

at::Tensor tensor_of(const py::handle& object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("a tensor is asked for, not " +
                         std::string(Py_TYPE(object.ptr())->tp_name));
  }
  return THPVariable_Unpack(object.ptr());
}

std::vector<at::Tensor> tensors_of(const py::list& objects) {
  std::vector<at::Tensor> tensors;
  for (const py::handle object : objects) {
    tensors.push_back(object.is_none() ? at::Tensor() : tensor_of(object));
  }
  return tensors;
}

py::object wrapped(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

ArtifactConstant constant_of(const ConstantRow& row) {
  ArtifactConstant constant;
  int kind = 0;
  std::tie(constant.names, kind, constant.dtype, constant.sizes, constant.strides) = row;
  if (constant.names.empty() || kind < 0 || kind > 2) {
    throw py::value_error("a constant has no name, or is of no kind");
  }
  constant.kind = static_cast<ArtifactConstant::Kind>(kind);
  return constant;
}

// A device by its name; none for the empty one.
std::optional<c10::Device> device_named(const std::string& name) {
  return name.empty() ? std::nullopt : std::optional(c10::Device(name));
}

std::unique_ptr<DeployedProgram> make_program(const std::string& program,
                                              const std::vector<ConstantRow>& constants,
                                              const py::list& values,
                                              const std::vector<std::string>& libraries,
                                              std::size_t runners, const std::string& gpu,
                                              const std::string& device) {
  DeployedProgram::Parts parts;
  parts.device = taken(program_device(gpu, device_named(device)));
  parts.program = program;
  std::vector<ArtifactConstant> described;
  for (const ConstantRow& row : constants) {
    described.push_back(constant_of(row));
  }
  parts.values = tensors_of(values);
  if (parts.values.size() != constants.size()) {
    throw py::value_error("not one value for each constant");
  }
  parts.constants = taken(described_constants(described));
  parts.libraries.assign(libraries.begin(), libraries.end());
  parts.runners = runners;
  Result<std::unique_ptr<DeployedProgram>> made = [&] {
    const WithoutGil no_gil;
    return DeployedProgram::make(std::move(parts));
  }();
  return taken(std::move(made));
}

std::unique_ptr<DeployedProgram> open_program(const std::string& path,
                                              const std::vector<std::string>& keys,
                                              const std::string& environment, bool copy,
                                              bool verify, bool allow_untrusted,
                                              std::size_t runners, const std::string& revoked,
                                              const std::string& device) {
  const SigningRules rules = signing_rules_of(keys, revoked);
  DeployedProgram::Options options;
  options.copy = copy;
  options.verify_weights = verify;
  options.allow_untrusted = allow_untrusted;
  options.runners = runners;
  options.environment = environment;
  options.device = device_named(device);
  Result<std::unique_ptr<DeployedProgram>> opened = [&] {
    const WithoutGil no_gil;
    return DeployedProgram::open(path, rules, options);
  }();
  return taken(std::move(opened));
}

py::tuple run_program(DeployedProgram& program, const py::list& inputs, int place) {
  const std::vector<at::Tensor> tensors = tensors_of(inputs);
  Result<DeployedProgram::Answer> answer = [&] {
    const WithoutGil no_gil;
    return program.run(tensors, static_cast<DeployedProgram::Place>(place));
  }();
  DeployedProgram::Answer given = taken(std::move(answer));
  py::list outputs;
  for (at::Tensor& output : given.outputs) {
    outputs.append(wrapped(std::move(output)));
  }
  return py::make_tuple(std::move(outputs), given.version);
}

WeightSets::Which which_of(bool inactive) {
  return inactive ? WeightSets::Which::kInactive : WeightSets::Which::kActive;
}

void update_constants(DeployedProgram& program, const py::dict& values, bool inactive, bool whole,
                      bool keep) {
  std::map<std::string, at::Tensor> given;
  for (const auto& [name, value] : values) {
    given.emplace(py::cast<std::string>(name), tensor_of(value));
  }
  const Status status = [&] {
    const WithoutGil no_gil;
    return program.weights().update(given, {which_of(inactive), whole, keep});
  }();
  require_ok(status);
}

void swap_constants(DeployedProgram& program) {
  const Status status = [&] {
    const WithoutGil no_gil;
    return program.weights().swap();
  }();
  require_ok(status);
}

py::dict constant_values(DeployedProgram& program, bool inactive, bool folded) {
  auto found = [&] {
    const WithoutGil no_gil;
    return program.weights().values(which_of(inactive), folded);
  }();
  py::dict row;
  for (auto& [name, value] : taken(std::move(found))) {
    row[py::str(name)] = wrapped(value);
  }
  return row;
}

py::list tensor_rows(const std::vector<ProgramSpec::Tensor>& tensors) {
  py::list rows;
  for (const ProgramSpec::Tensor& tensor : tensors) {
    rows.append(py::make_tuple(tensor.name, dtype_name(tensor.form.dtype), tensor.form.sizes,
                               tensor.form.strides));
  }
  return rows;
}

py::list constant_rows(const std::vector<ConstantForm>& constants) {
  py::list rows;
  for (const ConstantForm& constant : constants) {
    rows.append(py::make_tuple(constant.names, static_cast<int>(constant.kind),
                               dtype_name(constant.form.dtype), constant.form.sizes,
                               constant.form.strides));
  }
  return rows;
}

std::uint64_t write_artifact_file(const std::string& path, const std::string& environment,
                                  const std::vector<std::string>& cpu_features,
                                  const std::map<std::string, std::string>& facts,
                                  const std::vector<std::string>& libraries,
                                  const std::vector<ConstantRow>& constants, const py::list& values,
                                  const std::string& key, std::int64_t expires,
                                  std::int64_t created) {
  const SigningKey signing = taken(SigningKey::read(key));
  ArtifactContents contents;
  contents.validity = {created, expires};
  contents.environment = environment;
  contents.cpu_features = cpu_features;
  contents.facts = facts;
  contents.libraries.assign(libraries.begin(), libraries.end());
  for (const ConstantRow& row : constants) {
    contents.constants.push_back(constant_of(row));
  }
  // Held until everything is written.
  const std::vector<at::Tensor> tensors = tensors_of(values);
  const std::vector<ConstantForm> forms = taken(described_constants(contents.constants));
  if (tensors.size() != forms.size()) {
    throw py::value_error("not one value for each constant");
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || !tensor.device().is_cpu() ||
        tensor.sizes() != at::IntArrayRef(forms[i].form.sizes) ||
        tensor.strides() != at::IntArrayRef(forms[i].form.strides) ||
        tensor.scalar_type() != forms[i].form.dtype) {
      throw py::value_error("the constant " + forms[i].names.front() + " is another tensor");
    }
    contents.data.emplace_back(static_cast<const std::byte*>(tensor.const_data_ptr()),
                               extent_bytes(forms[i].form));
  }
  Result<std::uint64_t> written = [&] {
    const WithoutGil no_gil;
    return write_module_artifact(path, std::move(contents), signing);
  }();
  return taken(std::move(written));
}

// What a header says, after the signature was checked; `verify` reads and compares everything.
py::dict read_artifact(const std::string& path, const std::vector<std::string>& keys, bool verify,
                       const std::string& revoked) {
  const SigningRules rules = signing_rules_of(keys, revoked);
  auto opened = [&]() -> Result<std::shared_ptr<const ModuleArtifact>> {
    const WithoutGil no_gil;
    auto artifact = ModuleArtifact::open(path, rules);
    if (artifact && verify) {
      if (Status status = artifact.value()->verify(); !status) return status;
    }
    return artifact;
  }();
  const std::shared_ptr<const ModuleArtifact> artifact = taken(std::move(opened));
  const ArtifactHeader& header = artifact->header();
  py::dict row;
  row["signer"] = header.signer.hex();
  row["digest"] = header.digest.hex();
  row["created"] = header.validity.created;
  row["expires"] = header.validity.expires;
  row["environment"] = header.environment;
  row["cpu_features"] = header.cpu_features;
  row["facts"] = header.facts;
  row["constants"] = constant_rows(taken(constant_forms(header)));
  row["bytes"] = header.file_bytes;
  return row;
}

}  // namespace

void bind_deploy(py::module_& module) {
  py::class_<DeployedProgram>(module, "DeployedProgram")
      .def_static("make", &make_program, py::arg("program"), py::arg("constants"),
                  py::arg("values"), py::arg("libraries"), py::arg("runners") = 0,
                  py::arg("gpu") = "", py::arg("device") = "")
      .def_static("open", &open_program, py::arg("path"), py::arg("keys"), py::arg("environment"),
                  py::arg("copy") = false, py::arg("verify") = false,
                  py::arg("allow_untrusted") = false, py::arg("runners") = 0,
                  py::arg("revoked") = "", py::arg("device") = "")
      .def("run", &run_program, py::arg("inputs"), py::arg("place") = 0)
      .def("update", &update_constants, py::arg("values"), py::arg("inactive"), py::arg("whole"),
           py::arg("keep"))
      .def("swap", &swap_constants)
      .def(
          "fold",
          [](DeployedProgram& program, bool inactive) {
            const Status status = [&] {
              const WithoutGil no_gil;
              return program.weights().fold(which_of(inactive));
            }();
            require_ok(status);
          },
          py::arg("inactive"))
      .def("drop_inactive",
           [](DeployedProgram& program) {
             const WithoutGil no_gil;
             program.weights().drop_inactive();
           })
      .def("values", &constant_values, py::arg("inactive"), py::arg("folded"))
      .def("is_ready", &DeployedProgram::is_ready)
      .def("wait_until_ready", &DeployedProgram::wait_until_ready, py::arg("seconds"),
           py::call_guard<WithoutGil>())
      .def("wait_until_idle", &DeployedProgram::wait_until_idle, py::arg("seconds"),
           py::call_guard<WithoutGil>())
      .def_property_readonly("runners", &DeployedProgram::runners)
      .def_property_readonly("device",
                             [](const DeployedProgram& program) { return program.device().str(); })
      .def_property_readonly(
          "version", [](DeployedProgram& program) { return program.weights().active()->version; })
      .def_property_readonly(
          "inactive_version",
          [](DeployedProgram& program) { return program.weights().inactive_version(); })
      .def_property_readonly(
          "inputs",
          [](const DeployedProgram& program) { return tensor_rows(program.spec().inputs); })
      .def_property_readonly(
          "outputs",
          [](const DeployedProgram& program) { return tensor_rows(program.spec().outputs); })
      .def_property_readonly("open_sizes",
                             [](const DeployedProgram& program) { return program.spec().open; })
      .def_property_readonly("call_spec",
                             [](const DeployedProgram& program) {
                               return py::make_tuple(program.spec().in_spec,
                                                     program.spec().out_spec);
                             })
      .def_property_readonly(
          "constants",
          [](DeployedProgram& program) { return constant_rows(program.weights().forms()); })
      .def_property_readonly("facts",
                             [](const DeployedProgram& program) {
                               return program.artifact() == nullptr
                                          ? std::map<std::string, std::string>()
                                          : program.artifact()->header().facts;
                             })
      .def_property_readonly("signer", [](const DeployedProgram& program) {
        return program.artifact() == nullptr ? std::string()
                                             : program.artifact()->header().signer.hex();
      });
  module.def("write_module_artifact", &write_artifact_file, py::arg("path"), py::arg("environment"),
             py::arg("cpu_features"), py::arg("facts"), py::arg("libraries"), py::arg("constants"),
             py::arg("values"), py::arg("key"), py::arg("expires") = 0, py::arg("created") = 0);
  module.def("read_module_artifact", &read_artifact, py::arg("path"), py::arg("keys"),
             py::arg("verify") = false, py::arg("revoked") = "");
  module.def("is_module_artifact",
             [](const std::string& path) { return is_module_artifact(path); });
}

}  // namespace eagercache
