#include "python_hooks/bindings/bundle_binding.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernel_cache/store/bundle.h"
#include "python_hooks/bindings/store_binding.h"
#include "python_hooks/bindings/without_gil.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// The value; StoreError without one.
template <typename T>
T value_of(Result<T> result) {
  if (!result) {
    throw_store_error(result.status());
  }
  return std::move(result).value();
}

py::dict counts_dict(const BundleCounts& counts) {
  py::dict row;
  row["kernels"] = counts.kernels;
  row["decisions"] = counts.decisions;
  row["present"] = counts.present;
  row["bytes"] = counts.bytes;
  row["digest"] = counts.digest.hex();
  return row;
}

void make_signing_key(const std::string& private_path, const std::string& public_path) {
  if (const Status status = SigningKey::make(private_path, public_path); !status) {
    throw_store_error(status);
  }
}

py::dict write(const std::string& path, DiskStore& store, const std::string& environment,
               const std::string& key, std::int64_t expires, std::int64_t created) {
  const SigningKey signing = value_of(SigningKey::read(key));
  Result<BundleCounts> counts = [&] {
    const WithoutGil no_gil;
    return write_bundle(path, store, environment, signing, {created, expires});
  }();
  return counts_dict(value_of(std::move(counts)));
}

std::unique_ptr<Bundle> read(const std::string& path, const std::vector<std::string>& trusted,
                             const std::string& revoked) {
  const SigningRules rules = signing_rules_of(trusted, revoked);
  Result<Bundle> bundle = [&] {
    const WithoutGil no_gil;
    return read_bundle(path, rules);
  }();
  return std::make_unique<Bundle>(value_of(std::move(bundle)));
}

py::dict import(const Bundle& bundle, DiskStore& store) {
  Result<BundleCounts> counts = [&] {
    const WithoutGil no_gil;
    return import_bundle(bundle, store);
  }();
  return counts_dict(value_of(std::move(counts)));
}

}  // namespace

void bind_bundle(py::module_& module) {
  py::class_<Bundle>(module, "Bundle")
      .def_property_readonly("signer", [](const Bundle& bundle) { return bundle.signer.hex(); })
      .def_property_readonly("digest", [](const Bundle& bundle) { return bundle.digest.hex(); })
      .def_property_readonly("created",
                             [](const Bundle& bundle) { return bundle.validity.created; })
      .def_property_readonly("expires",
                             [](const Bundle& bundle) { return bundle.validity.expires; })
      .def_readonly("environment", &Bundle::environment)
      .def_property_readonly("entries", [](const Bundle& bundle) {
        py::list rows;
        for (const Manifest& manifest : bundle.manifests) {
          rows.append(manifest_dict(manifest));
        }
        return rows;
      });
  module.def("make_signing_key", &make_signing_key, py::arg("private_path"),
             py::arg("public_path"));
  module.def("check_signing_key",
             [](const std::string& path) { value_of(SigningKey::read(path)); });
  module.def("public_key",
             [](const std::string& path) { return value_of(read_public_key(path)).hex(); });
  module.def("write_bundle", &write, py::arg("path"), py::arg("store"), py::arg("environment"),
             py::arg("key"), py::arg("expires") = 0, py::arg("created") = 0);
  module.def("read_bundle", &read, py::arg("path"), py::arg("trusted"), py::arg("revoked") = "");
  module.def("import_bundle", &import, py::arg("bundle"), py::arg("store"));
}

}  // namespace eagercache
