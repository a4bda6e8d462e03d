#pragma once

#include <cstddef>
#include <span>

#include "kernel_cache/base/status.h"

namespace eagercache {

// Whether the file in `image` is a shared object that we are willing to hand to dlopen: x86-64 ELF,
// ET_DYN, every segment inside the file, none both writable and executable, no executable stack, no
// text relocations, no RPATH, RUNPATH, audit or filter library, and needing only libraries of an
// allow-list (libtorch*, libc10*, libgomp, libstdc++, libcuda and the C library's own).
//
// Static thread-local storage (DF_STATIC_TLS) is refused: its space is small and shared by all
// libraries of the process. Dynamic TLS passes, as model containers of torch 2.15 have it.
//
// Checks sanity, not authenticity; the digest has been compared before. Never reads outside
// `image`; no alignment is required. kIncompatible says what is wrong.
Status check_elf(std::span<const std::byte> image);

}  // namespace eagercache
