#include "guards/table/table_budget.h"

#include <algorithm>

namespace eagercache {
namespace {

constexpr std::size_t kMaxEntries = 65'536;
constexpr std::size_t kMaxBytes = std::size_t{64} << 20;
constexpr std::size_t kTicksPerBudget = 256;  // while max_entries entries are inserted

}  // namespace

TableBudget::TableBudget(std::size_t max_entries, std::size_t max_bytes) noexcept
    : max_entries_(max_entries), max_bytes_(max_bytes) {}

TableBudget& TableBudget::process() noexcept {
  static auto* const budget = new TableBudget(kMaxEntries, kMaxBytes);  // outlives every table
  return *budget;
}

void TableBudget::add_entry(std::size_t bytes) noexcept {
  entries_.fetch_add(1, std::memory_order_relaxed);
  add_bytes(bytes);
  const std::size_t every = std::max<std::size_t>(max_entries_ / kTicksPerBudget, 1);
  if (inserted_.fetch_add(1, std::memory_order_relaxed) % every == 0) advance_tick();
}

void TableBudget::remove_entry(std::size_t bytes) noexcept {
  entries_.fetch_sub(1, std::memory_order_relaxed);
  remove_bytes(bytes);
}

}  // namespace eagercache
