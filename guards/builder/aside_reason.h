#pragma once

#include <cstdint>
#include <string_view>

#include "guards/base/left_out.h"

namespace eagercache {

// Why a call is answered by native without being counted as a miss. One name per rule of the
// hazard table; `stats()` and `explain()` show the names.
enum class AsideReason : std::uint8_t {
  kNone,               // the call has a key
  kTensorKind,         // sparse, quantized, nested, subclass, mode, conj, neg, zero tensor ...
  kMixedDevices,       // tensors on another device than the hook's or on two, or a named other one
  kNamedTensor,        // names must propagate
  kEmptyTensor,        // numel == 0: nothing to win, and reductions without identity raise
  kNoStorage,          // null data pointer (storage resized to 0)
  kLargeExtent,        // an element offset does not fit 31 bits
  kDtype,              // float8, bits, quantized and other rare types
  kIntegerDivision,    // division by zero raises in native and traps in compiled code
  kSymbolic,           // symbolic int, float or bool
  kUnexpectedValue,    // the stack holds something the schema did not promise
  kKeyTooLong,         // more words than a KeyBuffer holds
  kDispatchState,      // functorch, a Python mode or functionalization is active below us
  kFloatingPointMode,  // flush-denormal or another rounding mode is set on this thread
  kParallelRegion,     // called from inside an OpenMP region
  kOverlap,            // a written tensor shares memory with another one, or with itself
};
inline constexpr std::size_t kAsideReasonCount = 16;

constexpr std::string_view aside_reason_name(AsideReason reason) noexcept {
  switch (reason) {
    case AsideReason::kNone:
      return "none";
    case AsideReason::kTensorKind:
      return "tensor_kind";
    case AsideReason::kMixedDevices:
      return "mixed_devices";
    case AsideReason::kNamedTensor:
      return "named_tensor";
    case AsideReason::kEmptyTensor:
      return "empty_tensor";
    case AsideReason::kNoStorage:
      return "no_storage";
    case AsideReason::kLargeExtent:
      return "large_extent";
    case AsideReason::kDtype:
      return "dtype";
    case AsideReason::kIntegerDivision:
      return "integer_division";
    case AsideReason::kSymbolic:
      return "symbolic";
    case AsideReason::kUnexpectedValue:
      return "unexpected_value";
    case AsideReason::kKeyTooLong:
      return "key_too_long";
    case AsideReason::kDispatchState:
      return "dispatch_state";
    case AsideReason::kFloatingPointMode:
      return "floating_point_mode";
    case AsideReason::kParallelRegion:
      return "parallel_region";
    case AsideReason::kOverlap:
      return "overlap";
  }
  return "unknown";
}

// Whether a rule counts: always, but in the proof that tests watch it (left_out.h).
inline bool applies(AsideReason reason) noexcept {
  return !kMutations || !left_out("aside", aside_reason_name(reason));
}

}  // namespace eagercache
