#pragma once

// Calls that no kernel may answer, whatever was validated. Constant data, made from
// denied_operators.json by the build; any thread.

#include <span>
#include <string>
#include <string_view>

namespace eagercache {

// One row of denied_operators.json: kernels of these calls were seen to differ from native in a way
// that the proof does not always find.
struct DeniedRow {
  std::string_view op;            // "aten::pow.Tensor_Tensor"; a trailing * matches any end
  std::string_view dispatch_key;  // "CPU", "CUDA"; empty: both
  std::string_view dtype;         // of some tensor argument, "float64"; empty: every call
  std::string_view reason;        // one clause for people
};

// All rows, in the file's order.
std::span<const DeniedRow> denied_rows() noexcept;

// Why no kernel may answer calls of the operator whose tensors have these dtypes; empty when one
// may. Without dtypes: why it may answer none of its calls.
std::string denial(std::string_view op, std::string_view dispatch_key,
                   std::span<const std::string> dtypes,
                   std::span<const DeniedRow> rows = denied_rows());

// Whether any row names the operator.
bool is_ever_denied(std::string_view op, std::span<const DeniedRow> rows = denied_rows()) noexcept;

}  // namespace eagercache
