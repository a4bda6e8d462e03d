#include "python_hooks/bindings/bundle_binding.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernel_cache/store/bundle.h"
#include "kernel_cache/store/signed_entry.h"
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

std::vector<PublicKey> public_keys(const std::vector<std::string>& hex_keys) {
  std::vector<PublicKey> keys;
  for (const std::string& hex : hex_keys) {
    const std::optional<Digest> bytes = Digest::from_hex(hex);
    if (!bytes) {
      throw py::value_error("'" + hex + "' is no public key of 64 hexadecimal digits");
    }
    keys.push_back({bytes->bytes});
  }
  return keys;
}

// The signed entry and its objects' contents.
py::tuple sign_one(DiskStore& store, const std::string& digest, const std::string& environment,
                   const std::string& key_path, std::int64_t expires) {
  const std::optional<Digest> key = Digest::from_hex(digest);
  if (!key) {
    throw py::value_error("'" + digest + "' is not 64 hexadecimal digits");
  }
  const SigningKey signing = value_of(SigningKey::read(key_path));
  std::string entry;
  std::vector<std::string> objects;
  const Status status = [&] {
    const WithoutGil no_gil;
    Result<Manifest> manifest = store.find(*key);
    if (!manifest) {
      Result<Manifest> untried = store.find_untried(*key);
      if (!untried) return manifest.status();
      manifest = std::move(untried);
    }
    Result<std::string> bytes = sign_entry(manifest.value(), environment, signing, {0, expires});
    if (!bytes) return bytes.status();
    entry = std::move(bytes).value();
    for (std::size_t i = 0; i < manifest->objects.size(); ++i) {
      Result<std::string> content = store.read_object(manifest.value(), i);
      if (!content) return content.status();
      objects.push_back(std::move(content).value());
    }
    return Status::ok();
  }();
  if (!status) {
    throw_store_error(status);
  }
  py::list contents;
  for (const std::string& object : objects) {
    contents.append(py::bytes(object));
  }
  return py::make_tuple(py::bytes(entry), contents);
}

std::unique_ptr<SignedEntry> read_one(const std::string& bytes,
                                      const std::vector<std::string>& trusted,
                                      const std::string& revoked) {
  SigningRules rules;
  rules.trusted = public_keys(trusted);
  rules.revoked = revocations_of(revoked);
  return std::make_unique<SignedEntry>(value_of(read_entry(bytes, rules)));
}

bool import_one(const SignedEntry& entry, const std::vector<std::string>& objects, DiskStore& store,
                const std::string& untried) {
  Result<bool> stored = [&] {
    const WithoutGil no_gil;
    return import_entry(entry, objects, store, untried);
  }();
  return value_of(std::move(stored));
}

// What every signed file says of itself.
template <typename Signed>
py::class_<Signed> bind_signed(py::module_& module, const char* name) {
  return py::class_<Signed>(module, name)
      .def_property_readonly("signer", [](const Signed& file) { return file.signer.hex(); })
      .def_property_readonly("digest", [](const Signed& file) { return file.digest.hex(); })
      .def_property_readonly("expires", [](const Signed& file) { return file.validity.expires; })
      .def_readonly("environment", &Signed::environment);
}

void bind_signed_entry(py::module_& module) {
  bind_signed<SignedEntry>(module, "SignedEntry")
      .def_property_readonly(
          "entry", [](const SignedEntry& entry) { return manifest_dict(entry.manifest); });
  module.attr("MAX_SIGNED_ENTRY_BYTES") = kMaxSignedEntryBytes;
  module.def("sign_entry", &sign_one, py::arg("store"), py::arg("digest"), py::arg("environment"),
             py::arg("key"), py::arg("expires") = 0);
  module.def("read_entry", &read_one, py::arg("content"), py::arg("trusted"),
             py::arg("revoked") = "");
  module.def("import_entry", &import_one, py::arg("entry"), py::arg("objects"), py::arg("store"),
             py::arg("untried") = "");
}

}  // namespace

void bind_bundle(py::module_& module) {
  bind_signed<Bundle>(module, "Bundle")
      .def_property_readonly("created",
                             [](const Bundle& bundle) { return bundle.validity.created; })
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
  module.def("public_key_of_signer", [](const std::string& path) {
    return value_of(SigningKey::read(path)).public_key().hex();
  });
  bind_signed_entry(module);
}

}  // namespace eagercache
