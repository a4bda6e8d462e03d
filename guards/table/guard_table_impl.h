#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>

#include "guards/table/epoch.h"
#include "guards/table/guard_table.h"
#include "guards/table/guard_table_entry.h"
#include "guards/table/table_budget.h"

// Private to guard_table*.cc.
//
// Invariants.
// - slots_ points to an array of which at most half is not null. An entry is in it once, on its
//   probe path, with no null slot before it. Writers keep that true after every single store,
//   because readers look at any time: an entry is stored complete, one is taken away by a
//   tombstone (or null, when the next slot is null), and an array is outgrown by publishing
//   another.
// - A reader may hold an array or an entry that is unlinked already. It then gives the verdict
//   of a moment ago, which is a true one; epoch.h keeps the memory.
// - Every live entry is in exactly one queue: pending or decided.
// - Recency: the budget's tick counts inserted entries, coarsely. A hit stores the tick in its
//   entry only when it differs, so that hits of a settled program write nothing shared.
//   Eviction takes the oldest of a queue, and gives those used since it last looked a second
//   chance. Pending entries go first, but an eighth of the table is theirs: among decided
//   entries alone a new key could never become known. When all tables together hold too much,
//   recency alone counts.
namespace eagercache {

class GuardTable::Impl {
 public:
  using Entry = guard_table_detail::Entry;
  using Queue = guard_table_detail::Queue;
  using Slots = guard_table_detail::Slots;
  using Verdict = guard_table_detail::Verdict;

  // `generation` is the table's own.
  Impl(std::size_t max_entries, TableBudget& budget, std::atomic<std::uint64_t>& generation);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Found find(std::span<const Word> key, std::uint64_t hash, const Entry** entry) const noexcept;
  MissNote note_miss(std::span<const Word> key, std::uint64_t hash) noexcept;
  void set(std::span<const Word> key, std::uint64_t hash, Verdict verdict) noexcept;
  bool erase(std::span<const Word> key, std::uint64_t hash) noexcept;
  void clear() noexcept;
  void for_each(
      const std::function<void(std::span<const Word>, Found, std::uint64_t)>& visit) const;

  std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }
  std::size_t max_entries() const noexcept { return max_entries_; }

 private:
  class AllTables;

  // The methods below require mutex_.
  Slots* slots() const noexcept { return slots_.load(std::memory_order_relaxed); }
  Queue& queue_of(const Entry* entry) noexcept { return entry->decided ? decided_ : pending_; }
  Entry* insert(std::span<const Word> key, std::uint64_t hash, Verdict verdict,
                std::uint64_t calls) noexcept;
  bool make_room() noexcept;
  bool rebuild() noexcept;
  void link(Entry* entry) noexcept;
  void unlink(Entry* entry) noexcept;
  void evict() noexcept;
  // Gives up to `chances` of the oldest entries a second chance, and returns the oldest one then;
  // null of an empty queue.
  Entry* oldest(Queue& queue, std::size_t chances) noexcept;
  // Ticks since the least recently used entry was used; -1 without entries.
  std::int64_t age() noexcept;
  // Forgets the least recently used entries, `count` at most, those younger than `age` excepted.
  void forget_older(std::int64_t age, std::size_t count) noexcept;
  void collect_if_due() noexcept;

  // What find() reads, on one cache line.
  alignas(64) std::atomic<Slots*> slots_{nullptr};
  TableBudget& budget_;
  const std::size_t max_entries_;
  std::atomic<std::uint64_t>& generation_;

  alignas(64) mutable std::mutex mutex_;  // guards all below, and every store to the above
  std::atomic<std::size_t> size_{0};      // live entries; written under mutex_
  std::size_t used_ = 0;                  // slots that are not null
  std::size_t inserted_ = 0;              // entries since the last tick
  Queue pending_;
  Queue decided_;
  Limbo entry_limbo_{Entry::free};
  Limbo slots_limbo_{Slots::free};

  Impl* next_ = nullptr;  // guarded by AllTables' mutex
  Impl* previous_ = nullptr;
};

// Every table of the process. Around fork() all their locks are taken, so that the child finds no
// table half changed and no lock held by a thread that it does not have. Lock order: this class's
// mutex, then the tables'; with the first held, others but the fork handler only try the latter.
class GuardTable::Impl::AllTables {
 public:
  static void add(Impl* table);
  static void remove(Impl* table) noexcept;
  // Makes room in a budget that is exceeded, or a part of it. Never waits.
  static void make_room(const TableBudget& budget) noexcept;

 private:
  static void take_from_oldest_locked(const TableBudget& budget) noexcept;
  static std::mutex& mutex() noexcept;
  static void before() noexcept;
  static void after() noexcept;

  static inline Impl* first_ = nullptr;
};

}  // namespace eagercache
