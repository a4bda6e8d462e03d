#pragma once

// The map from call keys to verdicts that every hit reads. A table owns its entries, and frees one
// when no reader can hold it any more (epoch.h); kernels, which entries point to, are never freed.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "guards/key/call_key.h"
#include "guards/table/epoch.h"
#include "guards/table/guard_table_entry.h"
#include "guards/table/table_budget.h"

namespace eagercache {

struct MissNote {
  EntryState state = EntryState::kPending;  // after the call; a verdict may have arrived meanwhile
  const void* kernel = nullptr;
  bool inserted = false;  // this call created the entry

  // Times this key was noted as missed, this one included. 0 when the miss was not counted: the key
  // was new, and its insertion would have had to wait for the lock (or there was no memory, or
  // max_entries is 0). The next call of the same key tries again.
  std::uint64_t calls = 0;
};

// Where a table found a key, for who asks for the same key again: GuardTable::find_again. Plain
// data; that of a table that is no more is only of no use.
class RememberedKey {
 private:
  friend class GuardTable;
  const guard_table_detail::Entry* entry_ = nullptr;
  std::uint64_t generation_ = 0;  // of the table; 0: of none
};

// One operator's map from exact call key to verdict, at one dispatch key.
//
// On a caller's path: find() takes no lock, allocates nothing (but a thread's reader slot, once)
// and never waits. note_miss() does the same for a known key; to insert a new one it tries the lock
// and gives up when that is taken. All other methods take the lock and may allocate. Memory of
// evicted entries and outgrown tables is freed only when no reader can hold it (epoch.h).
//
// Bounded: past `max_entries` the least recently used entries are forgotten, pending ones first as
// long as they are more than an eighth. Recency is coarse: a sixteenth of max_entries insertions.
// Tables that share a budget are bounded together as well; then an insertion into one may forget
// entries of another.
//
// Without memory for an entry, verdicts are dropped and the key stays absent. After fork() the
// child has whole tables, and no lock that nobody holds.
class GuardTable {
 public:
  explicit GuardTable(std::size_t max_entries = 4096, TableBudget& budget = TableBudget::process());
  ~GuardTable();  // requires that no other thread is inside
  GuardTable(const GuardTable&) = delete;
  GuardTable& operator=(const GuardTable&) = delete;

  // Any thread. `hash` is hash_words(key). `remembered`, where given, is set when the key is there.
  Found find(std::span<const Word> key, std::uint64_t hash,
             RememberedKey* remembered = nullptr) const noexcept;

  // As find() of the key that `remembered` tells of, without a hash or a probe, where
  // `is_same(words)` is true of its words, which stay as they are until that returns. kAbsent where
  // it is false, and where the table does not know any more that the key is there. Any thread;
  // lock-free.
  template <typename IsSame>
  Found find_again(const RememberedKey& remembered, const IsSame& is_same) const noexcept;

  // As note_miss() of the pending key that `remembered` tells of, where `admits(calls)` is true of
  // the number that it would be. False, and nothing is counted: where it is not, where the key is
  // not pending or not there any more, and where another thread counts at the same moment. Any
  // thread; lock-free.
  template <typename Admits>
  bool note_again(const RememberedKey& remembered, const Admits& admits) const noexcept;

  // Counts a miss of `key`, inserting it as kPending when absent. Any thread; never waits.
  MissNote note_miss(std::span<const Word> key, std::uint64_t hash);

  // Installs a verdict, inserting the key when absent. `kernel` must live for ever.
  void set_kernel(std::span<const Word> key, std::uint64_t hash, const void* kernel);
  void set_native(std::span<const Word> key, std::uint64_t hash);
  // Whether a kernel was installed since the last clear(). Without one find() finds none.
  bool has_kernels() const noexcept { return has_kernels_.load(std::memory_order_relaxed); }

  // Forgets one key, or all of them. True when there was such an entry.
  bool erase(std::span<const Word> key, std::uint64_t hash);
  void clear();

  // May be a moment old.
  std::size_t size() const;
  std::size_t max_entries() const noexcept;
  // Visits a consistent copy of the entries; `visit` runs without the lock held.
  void for_each(
      const std::function<void(std::span<const Word>, Found, std::uint64_t calls)>& visit) const;

 private:
  class Impl;

  // The number that stands for the entries as they were since the last one was taken out: no two
  // tables of the process, and no two such times of one, have the same. Changed under the lock,
  // after an entry was unlinked and before it is handed to those that free it. So who is in a read
  // section and finds here the number that stood here before he found the entry reads it safely:
  // as for a pointer to it (epoch.h, U and L).
  std::atomic<std::uint64_t> generation_;
  const TableBudget& budget_;
  std::atomic<bool> has_kernels_{false};
  std::unique_ptr<Impl> impl_;
};

template <typename IsSame>
inline Found GuardTable::find_again(const RememberedKey& remembered,
                                    const IsSame& is_same) const noexcept {
  const ReadSection section;
  if (!section.entered() || remembered.generation_ != generation_.load(std::memory_order_seq_cst)) {
    return {};
  }
  const guard_table_detail::Entry& entry = *remembered.entry_;
  if (!is_same(std::span<const Word>(entry.words(), entry.size))) {
    return {};
  }
  entry.touch(budget_.tick());
  return entry.verdict.load(std::memory_order_acquire).found();
}

template <typename Admits>
inline bool GuardTable::note_again(const RememberedKey& remembered,
                                   const Admits& admits) const noexcept {
  const ReadSection section;
  if (!section.entered() || remembered.generation_ != generation_.load(std::memory_order_seq_cst)) {
    return false;
  }
  const guard_table_detail::Entry& entry = *remembered.entry_;
  std::uint64_t calls = entry.calls.load(std::memory_order_relaxed);
  const Found found = entry.verdict.load(std::memory_order_acquire).found();
  return found.state == EntryState::kPending && admits(calls + 1) &&
         entry.calls.compare_exchange_strong(calls, calls + 1, std::memory_order_relaxed);
}

}  // namespace eagercache
