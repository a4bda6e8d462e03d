#pragma once

#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>

namespace eagercache {

// The address of the first element of a tensor that a key was made of: it has a storage and keeps
// its fields itself, so that what TensorImpl asks before it tells the same need not be asked. For
// reading: a copy-on-write storage stays shared.
inline const void* data_of(const c10::TensorImpl& impl) noexcept {
  const auto* const base =
      static_cast<const std::byte*>(impl.unsafe_storage().unsafeGetStorageImpl()->data());
  const auto offset = static_cast<std::size_t>(impl.storage_offset());
  return base + offset * impl.dtype().itemsize();
}

}  // namespace eagercache
