#pragma once

#include <cstdint>
#include <string>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/format/manifest.h"
#include "kernel_cache/format/revocations.h"
#include "kernel_cache/format/signature.h"

namespace eagercache {

// The bundle that brought an entry into a store.
struct Origin {
  Digest bundle;
  PublicKey signer;
  std::int64_t expires = 0;  // seconds since 1970; 0: never
};

// Writes it into the facts "bundle", "signer" and "expires". An entry that was to expire before
// still does: who signs it anew does not make it younger.
void note_origin(const Origin& origin, Manifest* manifest);

// Says of an entry that another kind of machine made it, and that nobody has tried it here: the
// fact "untried", which says what is to be tried. It is in no store's answers until a worker has
// published it anew without that.
void note_untried(const std::string& what, Manifest* manifest);
bool is_untried(const Manifest& manifest);
// As whoever made it published it.
Manifest without_untried(Manifest manifest);

// Why an entry that a bundle brought is not to be used any more: its bundle, or the key that signed
// that, is revoked, or it has expired; or why it is not to be used yet: it is untried. Empty while
// it may be used, and for what was made here.
std::string withdrawal_of(const Manifest& manifest, const Revocations& revoked, std::int64_t now);

}  // namespace eagercache
