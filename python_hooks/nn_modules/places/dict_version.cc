#include "python_hooks/nn_modules/places/dict_version.h"

#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace eagercache {
namespace {

namespace py = pybind11;

#if PY_VERSION_HEX < 0x030D0000

std::uint64_t version_of_dict(PyObject* dict) noexcept {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
}

#else

struct Watched {
  std::uint64_t writes = 0;
  std::size_t holders = 0;
};

// Leaked, as the interpreter may write to a dictionary until it is gone. Entries stay where they
// are while there are holders.
std::unordered_map<PyObject*, Watched>& watched_dicts() {
  static auto* dicts = new std::unordered_map<PyObject*, Watched>();
  return *dicts;
}

// Called before the write. The same object once more is none, as for the versions before.
int count_write(PyDict_WatchEvent event, PyObject* dict, PyObject* key, PyObject* value) {
  if (event == PyDict_EVENT_MODIFIED && PyUnicode_CheckExact(key) &&
      PyDict_GetItemWithError(dict, key) == value) {
    return 0;
  }
  const auto found = watched_dicts().find(dict);
  if (found != watched_dicts().end()) {
    ++found->second.writes;
  }
  return 0;
}

// The interpreter has eight of them; this process takes one.
int watcher() {
  static const int id = PyDict_AddWatcher(count_write);
  if (id < 0) {
    PyErr_Clear();
    throw std::invalid_argument("the interpreter has no watcher of dictionaries left");
  }
  return id;
}

// Python 3.13.0 tells nobody of an attribute that is written into the object itself, where its
// values lie until its dictionary has a key that is no string. So it has one for a moment; what is
// written afterwards goes through the dictionary.
void take_values_out_of_the_object(PyObject* dict) {
#if PY_VERSION_HEX < 0x030E0000
  const py::object key = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(
      reinterpret_cast<PyObject*>(&PyBaseObject_Type)));  // equal to nothing else
  if (!key || PyDict_SetItem(dict, key.ptr(), Py_None) != 0 ||
      PyDict_DelItem(dict, key.ptr()) != 0) {
    throw py::error_already_set();
  }
#else
  static_cast<void>(dict);
#endif
}

#endif

}  // namespace

#if PY_VERSION_HEX < 0x030D0000

DictVersion::DictVersion(py::object dict)
    : dict_(std::move(dict)), version_(version_of_dict(dict_.ptr())) {}

DictVersion::~DictVersion() = default;

bool DictVersion::is_written() const noexcept { return version_of_dict(dict_.ptr()) != version_; }

void DictVersion::catch_up() noexcept { version_ = version_of_dict(dict_.ptr()); }

#else

DictVersion::DictVersion(py::object dict) : dict_(std::move(dict)) {
  if (!watched_dicts().contains(dict_.ptr())) {
    take_values_out_of_the_object(dict_.ptr());
    if (PyDict_Watch(watcher(), dict_.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  Watched& watched = watched_dicts()[dict_.ptr()];
  ++watched.holders;
  writes_ = &watched.writes;
  version_ = watched.writes;
}

DictVersion::~DictVersion() {
  if (writes_ == nullptr) {
    return;
  }
  const auto found = watched_dicts().find(dict_.ptr());
  if (--found->second.holders == 0) {
    watched_dicts().erase(found);
    if (PyDict_Unwatch(watcher(), dict_.ptr()) != 0) {
      PyErr_Clear();
    }
  }
}

bool DictVersion::is_written() const noexcept { return *writes_ != version_; }

void DictVersion::catch_up() noexcept { version_ = *writes_; }

#endif

DictVersion::DictVersion(DictVersion&& other) noexcept
    : dict_(std::move(other.dict_)),
      writes_(std::exchange(other.writes_, nullptr)),
      version_(other.version_) {}

DictVersion& DictVersion::operator=(DictVersion&& other) noexcept {
  std::swap(dict_, other.dict_);
  std::swap(writes_, other.writes_);
  std::swap(version_, other.version_);
  return *this;
}

}  // namespace eagercache
