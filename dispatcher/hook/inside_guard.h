#pragma once

#include <optional>

namespace eagercache {

// Marks the thread as being inside one of our kernels or a native kernel that a hook displaced:
// hooks met below go straight to native.
class InsideGuard {
 public:
  InsideGuard() noexcept { ++depth(); }
  ~InsideGuard() { --depth(); }
  InsideGuard(const InsideGuard&) = delete;
  InsideGuard& operator=(const InsideGuard&) = delete;
  static bool active() noexcept { return depth() != 0; }
  static bool nested() noexcept { return depth() > 1; }

 private:
  // Read on every call: a fixed offset from the thread pointer, in a shared object too.
  static int& depth() noexcept { return depth_; }
  [[gnu::tls_model("initial-exec")]] static constinit thread_local int depth_;
};

// An InsideGuard, where `inside`.
class InsideIf {
 public:
  explicit InsideIf(bool inside) noexcept {
    if (inside) guard_.emplace();
  }

 private:
  std::optional<InsideGuard> guard_;
};

}  // namespace eagercache
