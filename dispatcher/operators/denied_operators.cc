#include "dispatcher/operators/denied_operators.h"

#include <algorithm>

namespace eagercache {
namespace {

bool names(const DeniedRow& row, std::string_view op) noexcept {
  if (row.op.ends_with('*')) {
    return op.starts_with(row.op.substr(0, row.op.size() - 1));
  }
  return row.op == op;
}

}  // namespace

std::string denial(std::string_view op, std::string_view dispatch_key,
                   std::span<const std::string> dtypes, std::span<const DeniedRow> rows) {
  for (const DeniedRow& row : rows) {
    const bool here = row.dispatch_key.empty() || row.dispatch_key == dispatch_key;
    const bool these = row.dtype.empty() || std::ranges::find(dtypes, row.dtype) != dtypes.end();
    if (here && these && names(row, op)) {
      return "denied: " + std::string(row.reason);
    }
  }
  return {};
}

bool is_ever_denied(std::string_view op, std::span<const DeniedRow> rows) noexcept {
  return std::ranges::any_of(rows, [op](const DeniedRow& row) { return names(row, op); });
}

}  // namespace eagercache
