#pragma once

// Whether a dictionary was written to. Owned by guards. Under the GIL.

#include <pybind11/pybind11.h>

#include <cstdint>

namespace eagercache {

// Sees every write to a dictionary, by whatever way, and that it was written what was there before.
// Up to Python 3.12 the interpreter counts writes itself (PEP 509); from 3.13 on it calls those who
// watch (PyDict_Watch). Holds a reference to the dictionary. Everything needs the GIL.
class DictVersion {
 public:
  DictVersion() = default;
  // Throws std::invalid_argument when the interpreter lets nobody else watch.
  explicit DictVersion(pybind11::object dict);
  ~DictVersion();
  DictVersion(DictVersion&& other) noexcept;
  DictVersion& operator=(DictVersion&& other) noexcept;

  // Whether there was a write since this object was made, or `catch_up` was called.
  bool is_written() const noexcept;
  // The caller has seen that the dictionary has what it had.
  void catch_up() noexcept;

 private:
  pybind11::object dict_;
  const std::uint64_t* writes_ = nullptr;  // from 3.13 on: of all who watch this dictionary
  std::uint64_t version_ = 0;
};

}  // namespace eagercache
