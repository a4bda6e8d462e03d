#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/CppSignature.h>

#include <span>
#include <string_view>

#include "dispatcher/hook/operator_hook.h"
#include "guards/builder/unboxed_key.h"

namespace eagercache {

// What makes the unboxed hooks of one C++ signature.
struct UnboxedMaker {
  std::span<const UnboxedKind> kinds;  // one an argument
  std::size_t num_fresh;               // returns by value
  bool returns_list;
  c10::KernelFunction (*make)(OperatorHook& hook);
  c10::impl::CppSignature (*signature)();
};

// The maker for the operator of `hook`, by ATen's own headers; null where there is none, or where
// the operator's schema is not what that signature would be called for.
const UnboxedMaker* find_unboxed(const OperatorHook& hook);

// One operator of the table that cmake/unboxed_signatures.py generates, sorted by name.
struct UnboxedRow {
  std::string_view name;  // "aten::add.Tensor"
  const UnboxedMaker* maker;
};
std::span<const UnboxedRow> unboxed_rows() noexcept;

}  // namespace eagercache
