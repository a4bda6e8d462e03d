#include "guards/guard_table.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <vector>

#include "guards/epoch.h"
#include "guards/guard_table_entry.h"

// Invariants.
// - slots_ points to an array of which at most half is not null. An entry is in it once, on its
// probe
//   path, with no null slot before it. Writers keep that true after every single store, because
//   readers look at any time: an entry is stored complete, one is taken away by a tombstone (or
//   null, when the next slot is null), and an array is outgrown by publishing another.
// - A reader may hold an array or an entry that is unlinked already. It then gives the verdict of a
//   moment ago, which is a true one; epoch.h keeps the memory.
// - Every live entry is in exactly one queue: pending or decided.
// - Recency: a tick counts inserted entries, coarsely. A hit stores the tick in its entry only when
//   it differs, so that hits of a settled program write nothing shared. Eviction takes the oldest
//   of a queue, and gives those used since it last looked a second chance. Pending entries go
//   first, but an eighth of the table is theirs: among decided entries alone a new key could never
//   become known.
namespace eagercache {

using guard_table_detail::Entry;
using guard_table_detail::Queue;
using guard_table_detail::Slots;
using guard_table_detail::tombstone;
using guard_table_detail::Verdict;

namespace {

constexpr std::size_t kMinCapacity = 16;
constexpr std::size_t kMaxSecondChances = 64;  // an eviction; bounds what one inserting call pays
constexpr std::size_t kTicksPerTable = 16;     // while max_entries entries are inserted
constexpr std::size_t kPendingShare = 8;       // 1/8 of the entries

}  // namespace

class GuardTable::Impl {
 public:
  explicit Impl(std::size_t max_entries);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Found find(std::span<const Word> key, std::uint64_t hash) const noexcept;
  MissNote note_miss(std::span<const Word> key, std::uint64_t hash) noexcept;
  void set(std::span<const Word> key, std::uint64_t hash, Verdict verdict) noexcept;
  bool erase(std::span<const Word> key, std::uint64_t hash) noexcept;
  void clear() noexcept;
  void for_each(
      const std::function<void(std::span<const Word>, Found, std::uint64_t)>& visit) const;

  std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }
  std::size_t max_entries() const noexcept { return max_entries_; }

 private:
  class ForkGuard;

  // Marks an entry as used now. The caller is in a read section or holds mutex_.
  void touch(Entry* entry) const noexcept {
    const std::uint32_t now = tick_.load(std::memory_order_relaxed);
    if (entry->tick.load(std::memory_order_relaxed) != now) {
      entry->tick.store(now, std::memory_order_relaxed);
    }
  }

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
  void collect_if_due() noexcept;

  // What find() reads, on one cache line.
  alignas(64) std::atomic<Slots*> slots_{nullptr};
  std::atomic<std::uint32_t> tick_{1};
  const std::size_t max_entries_;

  alignas(64) mutable std::mutex mutex_;  // guards all below, and every store to the above
  std::atomic<std::size_t> size_{0};      // live entries; written under mutex_
  std::size_t used_ = 0;                  // slots that are not null
  std::size_t inserted_ = 0;              // entries since the last tick
  Queue pending_;
  Queue decided_;
  Limbo entry_limbo_{Entry::free};
  Limbo slots_limbo_{Slots::free};

  Impl* next_ = nullptr;  // guarded by ForkGuard's mutex
  Impl* previous_ = nullptr;
};

// Every table's lock is taken around fork(), so that the child finds no table half changed and no
// lock held by a thread that it does not have. Lock order: this class's mutex, then the tables'.
class GuardTable::Impl::ForkGuard {
 public:
  static void add(Impl* table) {
    const std::lock_guard lock(mutex());
    static const int kRegistered = pthread_atfork(before, after, after);
    (void)kRegistered;
    table->next_ = first_;
    if (first_ != nullptr) first_->previous_ = table;
    first_ = table;
  }

  static void remove(Impl* table) noexcept {
    const std::lock_guard lock(mutex());
    (table->previous_ != nullptr ? table->previous_->next_ : first_) = table->next_;
    if (table->next_ != nullptr) table->next_->previous_ = table->previous_;
  }

 private:
  static std::mutex& mutex() noexcept {
    static auto* const kMutex = new std::mutex;  // outlives every table with static storage
    return *kMutex;
  }
  static void before() noexcept {
    mutex().lock();
    for (auto* table = first_; table != nullptr; table = table->next_) table->mutex_.lock();
  }
  static void after() noexcept {
    for (auto* table = first_; table != nullptr; table = table->next_) table->mutex_.unlock();
    mutex().unlock();
  }

  static inline Impl* first_ = nullptr;
};

GuardTable::Impl::Impl(std::size_t max_entries) : max_entries_(max_entries) {
  Slots* const slots = Slots::make(kMinCapacity);
  if (slots == nullptr) throw std::bad_alloc();
  slots_.store(slots, std::memory_order_seq_cst);
  ForkGuard::add(this);
}

GuardTable::Impl::~Impl() {
  ForkGuard::remove(this);
  for (Queue* queue : {&pending_, &decided_}) {
    while (Entry* const entry = queue->oldest()) {
      queue->remove(entry);
      Entry::free(entry);
    }
  }
  Slots::free(slots());
}

Found GuardTable::Impl::find(std::span<const Word> key, std::uint64_t hash) const noexcept {
  const ReadSection section;
  if (!section.entered()) [[unlikely]]
    return {};
  Entry* const entry = slots_.load(std::memory_order_seq_cst)->probe(key, hash);
  if (entry == nullptr) return {};
  touch(entry);
  return entry->verdict.load(std::memory_order_acquire).found();
}

MissNote GuardTable::Impl::note_miss(std::span<const Word> key, std::uint64_t hash) noexcept {
  const auto count = [this](Entry* entry) noexcept {
    touch(entry);
    const std::uint64_t calls = entry->calls.fetch_add(1, std::memory_order_relaxed) + 1;
    const Found found = entry->verdict.load(std::memory_order_acquire).found();
    return MissNote{found.state, found.kernel, false, calls};
  };
  {
    const ReadSection section;
    if (!section.entered()) return {};
    Entry* const entry = slots_.load(std::memory_order_seq_cst)->probe(key, hash);
    if (entry != nullptr) return count(entry);
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return {};
  if (Entry* const entry = slots()->probe(key, hash)) return count(entry);
  if (insert(key, hash, Verdict(EntryState::kPending, nullptr), 1) == nullptr) return {};
  collect_if_due();
  return {EntryState::kPending, nullptr, true, 1};
}

void GuardTable::Impl::set(std::span<const Word> key, std::uint64_t hash,
                           Verdict verdict) noexcept {
  const std::lock_guard lock(mutex_);
  Entry* const entry = slots()->probe(key, hash);
  if (entry == nullptr) {
    insert(key, hash, verdict, 0);
    collect_if_due();
    return;
  }
  entry->verdict.store(verdict, std::memory_order_release);
  touch(entry);
  queue_of(entry).remove(entry);
  entry->decided = true;
  decided_.push_newest(entry);
}

bool GuardTable::Impl::erase(std::span<const Word> key, std::uint64_t hash) noexcept {
  const std::lock_guard lock(mutex_);
  Entry* const entry = slots()->probe(key, hash);
  if (entry == nullptr) return false;
  unlink(entry);
  collect_if_due();
  return true;
}

void GuardTable::Impl::clear() noexcept {
  const std::lock_guard lock(mutex_);
  while (!pending_.empty()) unlink(pending_.oldest());
  while (!decided_.empty()) unlink(decided_.oldest());
  rebuild();
  entry_limbo_.collect();
  slots_limbo_.collect();
}

void GuardTable::Impl::for_each(
    const std::function<void(std::span<const Word>, Found, std::uint64_t)>& visit) const {
  struct Copy {
    std::vector<Word> key;
    Found found;
    std::uint64_t calls;
  };
  std::vector<Copy> copies;
  {
    const std::lock_guard lock(mutex_);
    copies.reserve(size());
    for (const Queue* queue : {&pending_, &decided_}) {
      for (const Entry* entry = queue->oldest(); entry != nullptr; entry = entry->newer) {
        copies.push_back({{entry->words(), entry->words() + entry->size},
                          entry->verdict.load(std::memory_order_acquire).found(),
                          entry->calls.load(std::memory_order_relaxed)});
      }
    }
  }
  for (const Copy& copy : copies) visit(copy.key, copy.found, copy.calls);
}

// The key must be absent. Null when the table holds nothing (max_entries 0), or without memory.
Entry* GuardTable::Impl::insert(std::span<const Word> key, std::uint64_t hash, Verdict verdict,
                                std::uint64_t calls) noexcept {
  if (max_entries_ == 0 || !make_room()) return nullptr;
  Entry* const entry = Entry::make(key, hash);
  if (entry == nullptr) return nullptr;
  if (++inserted_ > max_entries_ / kTicksPerTable) {
    inserted_ = 0;
    tick_.store(tick_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  const std::uint32_t now = tick_.load(std::memory_order_relaxed);
  entry->verdict.store(verdict, std::memory_order_relaxed);
  entry->calls.store(calls, std::memory_order_relaxed);
  entry->tick.store(now, std::memory_order_relaxed);
  entry->checked_tick = now;
  entry->decided = verdict.found().state != EntryState::kPending;
  link(entry);
  queue_of(entry).push_newest(entry);
  return entry;
}

// One more entry may be linked afterwards. False without memory.
bool GuardTable::Impl::make_room() noexcept {
  while (size() >= max_entries_) evict();
  return (used_ + 1) * 2 <= slots()->capacity() || rebuild();
}

// Publishes an array without tombstones, with room for half as many entries again.
bool GuardTable::Impl::rebuild() noexcept {
  const std::size_t wanted = std::max(kMinCapacity, 3 * (size() + 1));
  Slots* const fresh = Slots::make(std::bit_ceil(wanted));
  if (fresh == nullptr) return false;
  for (const Queue* queue : {&pending_, &decided_}) {
    for (Entry* entry = queue->oldest(); entry != nullptr; entry = entry->newer) {
      std::size_t i = entry->hash & fresh->mask;
      while (fresh->begin()[i].load(std::memory_order_relaxed) != nullptr) {
        i = (i + 1) & fresh->mask;
      }
      fresh->begin()[i].store(entry, std::memory_order_relaxed);
    }
  }
  Slots* const outgrown = slots();
  slots_.store(fresh, std::memory_order_seq_cst);
  used_ = size();
  slots_limbo_.retire(outgrown, outgrown->bytes());
  return true;
}

void GuardTable::Impl::link(Entry* entry) noexcept {
  Slots* const all = slots();
  for (std::size_t i = entry->hash & all->mask;; i = (i + 1) & all->mask) {
    std::atomic<Entry*>& slot = all->begin()[i];
    Entry* const there = slot.load(std::memory_order_relaxed);
    if (there != nullptr && there != &tombstone) continue;
    used_ += there == nullptr;
    slot.store(entry, std::memory_order_seq_cst);
    size_.store(size() + 1, std::memory_order_relaxed);
    return;
  }
}

void GuardTable::Impl::unlink(Entry* entry) noexcept {
  Slots* const all = slots();
  std::atomic<Entry*>* const slot = all->begin();
  std::size_t i = entry->hash & all->mask;
  while (slot[i].load(std::memory_order_relaxed) != entry) i = (i + 1) & all->mask;
  if (slot[(i + 1) & all->mask].load(std::memory_order_relaxed) != nullptr) {
    slot[i].store(&tombstone, std::memory_order_seq_cst);
  } else {
    // No probe passes this slot, nor the tombstones that end here.
    do {
      slot[i].store(nullptr, std::memory_order_seq_cst);
      --used_;
      i = (i - 1) & all->mask;
    } while (slot[i].load(std::memory_order_relaxed) == &tombstone);
  }
  queue_of(entry).remove(entry);
  size_.store(size() - 1, std::memory_order_relaxed);
  entry_limbo_.retire(entry, entry->bytes());
}

void GuardTable::Impl::evict() noexcept {
  const bool from_pending = decided_.empty() || pending_.size() > max_entries_ / kPendingShare;
  Queue& queue = from_pending ? pending_ : decided_;
  for (std::size_t i = 0; i < kMaxSecondChances && i < queue.size(); ++i) {
    Entry* const entry = queue.oldest();
    const std::uint32_t used = entry->tick.load(std::memory_order_relaxed);
    if (used == entry->checked_tick) break;
    entry->checked_tick = used;
    queue.remove(entry);
    queue.push_newest(entry);
  }
  unlink(queue.oldest());
}

void GuardTable::Impl::collect_if_due() noexcept {
  if (entry_limbo_.due()) entry_limbo_.collect();
  if (slots_limbo_.due()) slots_limbo_.collect();
}

GuardTable::GuardTable(std::size_t max_entries) : impl_(std::make_unique<Impl>(max_entries)) {}

GuardTable::~GuardTable() = default;

Found GuardTable::find(std::span<const Word> key, std::uint64_t hash) const noexcept {
  return impl_->find(key, hash);
}

MissNote GuardTable::note_miss(std::span<const Word> key, std::uint64_t hash) {
  return impl_->note_miss(key, hash);
}

void GuardTable::set_kernel(std::span<const Word> key, std::uint64_t hash, const void* kernel) {
  impl_->set(key, hash, Verdict(EntryState::kKernel, kernel));
}

void GuardTable::set_native(std::span<const Word> key, std::uint64_t hash) {
  impl_->set(key, hash, Verdict(EntryState::kNative, nullptr));
}

bool GuardTable::erase(std::span<const Word> key, std::uint64_t hash) {
  return impl_->erase(key, hash);
}

void GuardTable::clear() { impl_->clear(); }

std::size_t GuardTable::size() const { return impl_->size(); }

std::size_t GuardTable::max_entries() const noexcept { return impl_->max_entries(); }

void GuardTable::for_each(
    const std::function<void(std::span<const Word>, Found, std::uint64_t calls)>& visit) const {
  impl_->for_each(visit);
}

}  // namespace eagercache
