#pragma once

#include <cstdint>
#include <mutex>

namespace eagercache {

// What fork() means to us. A child shares our descriptors and may have been made while another
// thread was anywhere; it must neither release its parent's locks nor write the store.
//
// All functions are thread-safe. The first call of any of them registers the handlers.

// Changes in every forked child. An object that remembers the value of its creation knows, without
// a system call, that it was inherited.
std::uint64_t fork_generation() noexcept;

// The one mutex of kernel_cache/. Guards pointers and small tables only, never a system call, and
// is taken around fork() so that a child never finds it held.
std::mutex& process_mutex() noexcept;

// Descriptors that a forked child closes before anything else runs in it (held locks). Returns a
// slot for forget_inherited, or -1 when the table is full; the descriptor then lives on in children
// until they exec.
int close_in_child(int fd) noexcept;
void forget_inherited(int slot) noexcept;

}  // namespace eagercache
