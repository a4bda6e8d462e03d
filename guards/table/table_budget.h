#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace eagercache {

// What many tables may hold together, in entries and in bytes of them and of their slots. Past it
// the least recently used entries of all tables are forgotten, whichever table they are in. Memory
// that readers may still hold comes on top, a few hundred KB a table at most.
//
// Who inserts also makes room, and never waits for it: a table that another thread is changing is
// passed over. So the bound may be passed for moments, by about an entry for each inserting thread.
//
// Must outlive its tables. All methods are for any thread.
class TableBudget {
 public:
  TableBudget(std::size_t max_entries, std::size_t max_bytes) noexcept;
  TableBudget(const TableBudget&) = delete;
  TableBudget& operator=(const TableBudget&) = delete;

  // That of every table that names no other: 65,536 entries and 64 MiB.
  static TableBudget& process() noexcept;

  std::size_t entries() const noexcept { return entries_.load(std::memory_order_relaxed); }
  std::size_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }
  std::size_t max_entries() const noexcept { return max_entries_; }
  std::size_t max_bytes() const noexcept { return max_bytes_; }

  // --- for tables ---
  bool exceeded() const noexcept { return entries() > max_entries_ || bytes() > max_bytes_; }
  // The time by which recency is told: it moves on with insertions alone, so that a settled program
  // writes nothing.
  std::uint32_t tick() const noexcept { return tick_.load(std::memory_order_relaxed); }
  void advance_tick() noexcept { tick_.fetch_add(1, std::memory_order_relaxed); }
  void add_entry(std::size_t bytes) noexcept;
  void remove_entry(std::size_t bytes) noexcept;
  void add_bytes(std::size_t bytes) noexcept { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void remove_bytes(std::size_t bytes) noexcept {
    bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  }

 private:
  // Read by every hit; on a line that only insertions write.
  alignas(64) std::atomic<std::uint32_t> tick_{1};
  const std::size_t max_entries_;
  const std::size_t max_bytes_;
  alignas(64) std::atomic<std::size_t> entries_{0};
  std::atomic<std::size_t> bytes_{0};
  std::atomic<std::size_t> inserted_{0};
};

}  // namespace eagercache
