#include <exception>
#include <new>

#include "cpp_api/store_choice.h"
#include "eagercache/eagercache.h"

namespace eagercache {

BundleCheck check_bundle(const std::filesystem::path& bundle,
                         const std::vector<std::filesystem::path>& trusted_keys,
                         const std::filesystem::path& revoked) {
  BundleCheck check;
  try {
    const Result<Bundle> read = read_usable_bundle(bundle, trusted_keys, revoked);
    if (!read) {
      check.reason = read.status().message();
      check.code = status_code_name(read.code());
      return check;
    }
    check.usable = true;
    check.signer = read.value().signer.hex();
    check.digest = read.value().digest.hex();
    check.created = read.value().validity.created;
    check.expires = read.value().validity.expires;
    for (const Manifest& manifest : read.value().manifests) {
      ++(manifest.kind == EntryKind::kKernel ? check.kernels : check.decisions);
    }
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    check.reason = error.what();
    check.code = status_code_name(StatusCode::kIoError);
  }
  return check;
}

}  // namespace eagercache
