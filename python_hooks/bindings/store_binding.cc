#include "python_hooks/bindings/store_binding.h"

#include <pybind11/stl.h>

#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dispatcher/base/log.h"
#include "kernel_cache/store/disk_store.h"
#include "python_hooks/bindings/without_gil.h"

namespace eagercache {
namespace {

namespace py = pybind11;

// Carries a Status to Python as StoreError with an attribute `code`.
class StoreFailure final : public std::runtime_error {
 public:
  explicit StoreFailure(const Status& status)
      : std::runtime_error(status.message()), code_(status_code_name(status.code())) {}
  const std::string& code() const noexcept { return code_; }

 private:
  std::string code_;
};

PyObject* store_error_type = nullptr;  // owned by the module

Digest parse_digest(const std::string& hex) {
  const std::optional<Digest> digest = Digest::from_hex(hex);
  if (!digest) {
    throw py::value_error("'" + hex + "' is not 64 hexadecimal digits");
  }
  return *digest;
}

py::dict manifest_to_dict(const Manifest& manifest) {
  py::list objects;
  for (const ObjectRef& object : manifest.objects) {
    py::dict entry;
    entry["kind"] = std::string(object_kind_name(object.kind));
    entry["digest"] = object.digest.hex();
    entry["size"] = object.size;
    objects.append(entry);
  }
  py::dict result;
  result["key"] = manifest.key.hex();
  result["kind"] = std::string(entry_kind_name(manifest.kind));
  result["objects"] = objects;
  result["cpu_features"] = manifest.cpu_features;
  result["created"] = manifest.created;
  result["failure"] = manifest.failure == FailureClass::kTransient ? "transient" : "deterministic";
  result["retry_after"] = manifest.retry_after;
  result["facts"] = manifest.facts;
  return result;
}

EntryKind parse_entry_kind(const std::string& name) {
  for (const EntryKind kind : {EntryKind::kKernel, EntryKind::kNative, EntryKind::kFailed}) {
    if (entry_kind_name(kind) == name) {
      return kind;
    }
  }
  throw py::value_error("entry kind '" + name + "' is not kernel, native or failed");
}

ObjectKind parse_object_kind(const std::string& name) {
  for (const ObjectKind kind : {ObjectKind::kSharedObject, ObjectKind::kCubin}) {
    if (object_kind_name(kind) == name) {
      return kind;
    }
  }
  throw py::value_error("object kind '" + name + "' is not so or cubin");
}

Manifest manifest_from_dict(const py::dict& source) {
  Manifest manifest;
  manifest.key = parse_digest(source["key"].cast<std::string>());
  manifest.kind = parse_entry_kind(source["kind"].cast<std::string>());
  if (source.contains("cpu_features")) {
    manifest.cpu_features = source["cpu_features"].cast<std::vector<std::string>>();
  }
  if (source.contains("created")) {
    manifest.created = source["created"].cast<std::int64_t>();
  }
  if (source.contains("failure") && source["failure"].cast<std::string>() == "transient") {
    manifest.failure = FailureClass::kTransient;
  }
  if (source.contains("retry_after")) {
    manifest.retry_after = source["retry_after"].cast<std::int64_t>();
  }
  if (source.contains("facts")) {
    manifest.facts = source["facts"].cast<std::map<std::string, std::string>>();
  }
  return manifest;
}

std::shared_ptr<DiskStore> open_store(const std::string& root, const std::string& environment,
                                      bool read_only, const std::vector<std::string>& tiers,
                                      bool allow_untrusted, std::uint64_t max_bytes,
                                      std::uint64_t max_entries, const std::string& revoked) {
  StoreOptions options;
  options.revoked = revocations_of(revoked);
  options.on_withdrawn = [](const std::string& why) { warn_once("withdrawn:" + why, why); };
  options.root = root;
  options.environment = environment;
  options.read_only = read_only;
  options.tiers.assign(tiers.begin(), tiers.end());
  options.allow_untrusted = allow_untrusted;
  options.max_bytes = max_bytes;
  options.max_entries = max_entries;
  const WithoutGil no_gil;
  Result<std::unique_ptr<DiskStore>> store = DiskStore::open(std::move(options));
  if (!store) {
    throw StoreFailure(store.status());
  }
  return std::move(store).value();
}

py::object find(DiskStore& store, const std::string& digest) {
  const Digest key = parse_digest(digest);
  const Result<Manifest> manifest = [&] {
    const WithoutGil no_gil;
    return store.find(key);
  }();
  if (manifest) {
    return manifest_to_dict(manifest.value());
  }
  if (manifest.code() == StatusCode::kNotFound) {
    return py::none();
  }
  throw StoreFailure(manifest.status());
}

py::object find_untried(DiskStore& store, const std::string& digest) {
  const Digest key = parse_digest(digest);
  const Result<Manifest> manifest = [&] {
    const WithoutGil no_gil;
    return store.find_untried(key);
  }();
  return manifest ? py::object(manifest_to_dict(manifest.value())) : py::object(py::none());
}

// A file with an object's verified content: of a shared object the one that may be loaded.
std::string object_file_of(DiskStore& store, const std::string& digest, std::size_t index,
                           const std::string& folder) {
  const Digest key = parse_digest(digest);
  const WithoutGil no_gil;
  Result<Manifest> manifest = store.find(key);
  if (!manifest) {
    manifest = store.find_untried(key);
  }
  if (!manifest) {
    throw StoreFailure(manifest.status());
  }
  if (index < manifest->objects.size() &&
      manifest->objects[index].kind == ObjectKind::kSharedObject) {
    const Result<std::filesystem::path> path =
        store.verified_shared_object(manifest.value(), index);
    if (!path) {
      throw StoreFailure(path.status());
    }
    return path.value().string();
  }
  const Result<std::string> content = store.read_object(manifest.value(), index);
  if (!content) {
    throw StoreFailure(content.status());
  }
  const std::filesystem::path path =
      std::filesystem::path(folder) / manifest->objects[index].digest.hex();
  std::ofstream file(path, std::ios::binary);
  file << content.value();
  file.close();
  if (!file) {
    throw StoreFailure(Status(StatusCode::kIoError, path.string() + " cannot be written"));
  }
  return path.string();
}

py::dict publish(DiskStore& store, const py::dict& manifest,
                 const std::vector<std::pair<std::string, std::string>>& sources) {
  Manifest entry = manifest_from_dict(manifest);
  std::vector<ObjectSource> objects;
  objects.reserve(sources.size());
  for (const auto& [kind, path] : sources) {
    objects.push_back({parse_object_kind(kind), path});
  }
  const Result<Manifest> stored = [&] {
    const WithoutGil no_gil;
    return store.publish(std::move(entry), objects);
  }();
  if (!stored) {
    throw StoreFailure(stored.status());
  }
  return manifest_to_dict(stored.value());
}

// A held cross-process lock; released by release() or with the object.
struct StoreLock {
  std::optional<FileLock> lock;
};

std::unique_ptr<StoreLock> try_lock(DiskStore& store, const std::string& digest) {
  Result<FileLock> lock = store.try_lock(parse_digest(digest));
  if (lock) {
    return std::make_unique<StoreLock>(StoreLock{std::move(lock).value()});
  }
  if (lock.code() == StatusCode::kBusy) {
    return nullptr;
  }
  throw StoreFailure(lock.status());
}

std::string make_work_directory(DiskStore& store) {
  const Result<std::filesystem::path> path = store.make_work_directory();
  if (!path) {
    throw StoreFailure(path.status());
  }
  return path.value().string();
}

std::vector<EntryInfo> collect(DiskStore& store, bool all) {
  std::vector<EntryInfo> entries;
  const Status status = [&] {
    const WithoutGil no_gil;
    return store.for_each(all, [&entries](const EntryInfo& entry) { entries.push_back(entry); });
  }();
  if (!status) {
    throw StoreFailure(status);
  }
  return entries;
}

py::list entries(DiskStore& store, bool all) {
  py::list rows;
  for (const EntryInfo& entry : collect(store, all)) {
    py::dict row = manifest_to_dict(entry.manifest);
    row["environment"] = entry.environment;
    row["bytes"] = entry.bytes;
    row["last_used"] = entry.last_used;
    rows.append(row);
  }
  return rows;
}

// (key, environment, problem) of every entry; the problem is empty for a sound one.
py::list verify(DiskStore& store, bool all) {
  py::list rows;
  for (const EntryInfo& entry : collect(store, all)) {
    std::string problem;
    for (std::size_t i = 0; i < entry.manifest.objects.size() && problem.empty(); ++i) {
      const WithoutGil no_gil;
      const Status status = store.read_object(entry.manifest, i).status();
      if (!status) {
        problem = status.to_string();
      }
    }
    rows.append(py::make_tuple(entry.manifest.key.hex(), entry.environment, problem));
  }
  return rows;
}

py::dict evict(DiskStore& store, bool force, bool when_due) {
  const Result<EvictionResult> result = [&] {
    const WithoutGil no_gil;
    return when_due ? store.evict_when_due() : store.evict(force);
  }();
  if (!result) {
    throw StoreFailure(result.status());
  }
  py::dict counts;
  counts["entries_removed"] = result.value().entries_removed;
  counts["objects_removed"] = result.value().objects_removed;
  counts["temporaries_removed"] = result.value().temporaries_removed;
  counts["bytes_removed"] = result.value().bytes_removed;
  return counts;
}

void remove(DiskStore& store, const std::string& digest) {
  if (const Status status = store.remove(parse_digest(digest)); !status) {
    throw StoreFailure(status);
  }
}

void quarantine(DiskStore& store, const std::string& digest, const std::string& reason) {
  if (const Status status = store.quarantine(parse_digest(digest), reason); !status) {
    throw StoreFailure(status);
  }
}

// How Python sees a StoreFailure.
void bind_store_error(py::module_& module) {
  store_error_type = PyErr_NewException("eagercache._C.StoreError", PyExc_RuntimeError, nullptr);
  module.attr("StoreError") = py::handle(store_error_type);
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) {
        std::rethrow_exception(raised);
      }
    } catch (const StoreFailure& failure) {
      py::object error = py::handle(store_error_type)(failure.what());
      error.attr("code") = failure.code();
      PyErr_SetObject(store_error_type, error.ptr());
    }
  });
}

}  // namespace

void throw_store_error(const Status& status) { throw StoreFailure(status); }

py::dict manifest_dict(const Manifest& manifest) { return manifest_to_dict(manifest); }

Revocations revocations_of(const std::string& path) {
  if (path.empty()) {
    return {};
  }
  Result<Revocations> revoked = Revocations::read(path);
  if (!revoked) {
    throw_store_error(revoked.status());
  }
  return std::move(revoked).value();
}

SigningRules signing_rules_of(const std::vector<std::string>& keys, const std::string& revoked) {
  SigningRules rules;
  rules.revoked = revocations_of(revoked);
  for (const std::string& path : keys) {
    const Result<PublicKey> key = read_public_key(path);
    if (!key) {
      throw StoreFailure(key.status());
    }
    rules.trusted.push_back(key.value());
  }
  return rules;
}

void bind_store(py::module_& module) {
  bind_store_error(module);
  module.def(
      "check_revocations", [](const std::string& path) { (void)revocations_of(path); },
      py::arg("path"));
  py::class_<StoreLock>(module, "StoreLock").def("release", [](StoreLock& self) {
    self.lock.reset();
  });

  py::class_<DiskStore, std::shared_ptr<DiskStore>>(module, "Store")
      .def(py::init(&open_store), py::arg("root"), py::arg("environment"), py::kw_only(),
           py::arg("read_only") = false, py::arg("tiers") = std::vector<std::string>{},
           py::arg("allow_untrusted") = false, py::arg("max_bytes") = StoreOptions{}.max_bytes,
           py::arg("max_entries") = StoreOptions{}.max_entries, py::arg("revoked") = "")
      .def(
          "withdrawal",
          [](const DiskStore& store, const py::dict& entry) {
            return store.withdrawal(manifest_from_dict(entry));
          },
          py::arg("entry"))
      .def("find", &find, py::arg("digest"))
      .def("find_untried", &find_untried, py::arg("digest"))
      .def("object_file", &object_file_of, py::arg("digest"), py::arg("index"), py::arg("folder"))
      .def("publish", &publish, py::arg("manifest"),
           py::arg("sources") = std::vector<std::pair<std::string, std::string>>{})
      .def("try_lock", &try_lock, py::arg("digest"))
      .def("make_work_directory", &make_work_directory)
      .def("entries", &entries, py::arg("all") = false)
      .def("verify", &verify, py::arg("all") = false)
      .def("evict", &evict, py::arg("force") = false, py::arg("when_due") = false)
      .def("remove", &remove, py::arg("digest"))
      .def("quarantine", &quarantine, py::arg("digest"), py::arg("reason"))
      .def_property_readonly("root", [](const DiskStore& store) { return store.root().string(); })
      .def_property_readonly("environment_id", &DiskStore::environment_id)
      .def_property_readonly("read_only", &DiskStore::read_only)
      .def_property_readonly("quarantined", &DiskStore::quarantined)
      .def_property_readonly("tier_problems",
                             [](const DiskStore& store) {
                               std::vector<std::string> problems;
                               for (const Status& problem : store.tier_problems()) {
                                 problems.push_back(problem.message());
                               }
                               return problems;
                             })
      .def_property_readonly("untrusted_roots", [](const DiskStore& store) {
        std::vector<std::string> roots;
        for (const std::filesystem::path& root : store.untrusted_roots()) {
          roots.push_back(root.string());
        }
        return roots;
      });
}

}  // namespace eagercache
