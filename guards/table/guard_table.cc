#include "guards/table/guard_table.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <new>
#include <vector>

#include "guards/table/guard_table_impl.h"

namespace eagercache {

using guard_table_detail::Entry;
using guard_table_detail::tombstone;
using guard_table_detail::Verdict;

namespace {

constexpr std::size_t kMinCapacity = 16;
constexpr std::size_t kMaxSecondChances = 64;  // an eviction; bounds what one inserting call pays
constexpr std::size_t kTicksPerTable = 16;     // while max_entries entries are inserted
constexpr std::size_t kPendingShare = 8;       // 1/8 of the entries

// A number that was given to no table before.
std::uint64_t next_generation() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

GuardTable::Impl::Impl(std::size_t max_entries, TableBudget& budget,
                       std::atomic<std::uint64_t>& generation)
    : budget_(budget), max_entries_(max_entries), generation_(generation) {
  Slots* const first = Slots::make(kMinCapacity);
  if (first == nullptr) throw std::bad_alloc();
  slots_.store(first, std::memory_order_seq_cst);
  budget_.add_bytes(first->bytes());
  AllTables::add(this);
}

GuardTable::Impl::~Impl() {
  AllTables::remove(this);
  for (Queue* queue : {&pending_, &decided_}) {
    while (Entry* const entry = queue->oldest()) {
      queue->remove(entry);
      budget_.remove_entry(entry->bytes());
      Entry::free(entry);
    }
  }
  budget_.remove_bytes(slots()->bytes());
  Slots::free(slots());
}

Found GuardTable::Impl::find(std::span<const Word> key, std::uint64_t hash,
                             const Entry** found) const noexcept {
  const ReadSection section;
  if (!section.entered()) [[unlikely]]
    return {};
  Entry* const entry = slots_.load(std::memory_order_seq_cst)->probe(key, hash);
  if (entry == nullptr) return {};
  if (found != nullptr) *found = entry;
  entry->touch(budget_.tick());
  return entry->verdict.load(std::memory_order_acquire).found();
}

MissNote GuardTable::Impl::note_miss(std::span<const Word> key, std::uint64_t hash) noexcept {
  const auto count = [this](Entry* entry) noexcept {
    entry->touch(budget_.tick());
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
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return {};
    if (Entry* const entry = slots()->probe(key, hash)) return count(entry);
    if (insert(key, hash, Verdict(EntryState::kPending, nullptr), 1) == nullptr) return {};
    collect_if_due();
  }
  if (budget_.exceeded()) AllTables::make_room(budget_);
  return {EntryState::kPending, nullptr, true, 1};
}

void GuardTable::Impl::set(std::span<const Word> key, std::uint64_t hash,
                           Verdict verdict) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (Entry* const entry = slots()->probe(key, hash)) {
      entry->verdict.store(verdict, std::memory_order_release);
      entry->touch(budget_.tick());
      queue_of(entry).remove(entry);
      entry->decided = true;
      decided_.push_newest(entry);
      return;
    }
    insert(key, hash, verdict, 0);
    collect_if_due();
  }
  if (budget_.exceeded()) AllTables::make_room(budget_);
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
    budget_.advance_tick();
  }
  budget_.add_entry(entry->bytes());
  const std::uint32_t now = budget_.tick();
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
  budget_.add_bytes(fresh->bytes());
  budget_.remove_bytes(outgrown->bytes());
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
  generation_.store(next_generation(), std::memory_order_seq_cst);  // before it is retired
  queue_of(entry).remove(entry);
  size_.store(size() - 1, std::memory_order_relaxed);
  budget_.remove_entry(entry->bytes());
  entry_limbo_.retire(entry, entry->bytes());
}

void GuardTable::Impl::evict() noexcept {
  const bool from_pending = decided_.empty() || pending_.size() > max_entries_ / kPendingShare;
  unlink(oldest(from_pending ? pending_ : decided_, kMaxSecondChances));
}

Entry* GuardTable::Impl::oldest(Queue& queue, std::size_t chances) noexcept {
  for (std::size_t i = 0; i < chances && i < queue.size(); ++i) {
    Entry* const entry = queue.oldest();
    const std::uint32_t used = entry->tick.load(std::memory_order_relaxed);
    if (used == entry->checked_tick) break;
    entry->checked_tick = used;
    queue.remove(entry);
    queue.push_newest(entry);
  }
  return queue.oldest();
}

void GuardTable::Impl::collect_if_due() noexcept {
  if (entry_limbo_.due()) entry_limbo_.collect();
  if (slots_limbo_.due()) slots_limbo_.collect();
}

GuardTable::GuardTable(std::size_t max_entries, TableBudget& budget)
    : generation_(next_generation()),
      budget_(budget),
      impl_(std::make_unique<Impl>(max_entries, budget, generation_)) {}

GuardTable::~GuardTable() = default;

Found GuardTable::find(std::span<const Word> key, std::uint64_t hash,
                       RememberedKey* remembered) const noexcept {
  // Before the entry is found: one that is taken out afterwards leaves another number behind.
  const std::uint64_t generation = generation_.load(std::memory_order_seq_cst);
  const Entry* entry = nullptr;
  const Found found = impl_->find(key, hash, &entry);
  if (remembered != nullptr && entry != nullptr) {
    remembered->entry_ = entry;
    remembered->generation_ = generation;
  }
  return found;
}

MissNote GuardTable::note_miss(std::span<const Word> key, std::uint64_t hash) {
  return impl_->note_miss(key, hash);
}

void GuardTable::set_kernel(std::span<const Word> key, std::uint64_t hash, const void* kernel) {
  has_kernels_.store(true, std::memory_order_relaxed);
  impl_->set(key, hash, Verdict(EntryState::kKernel, kernel));
}

void GuardTable::set_native(std::span<const Word> key, std::uint64_t hash) {
  impl_->set(key, hash, Verdict(EntryState::kNative, nullptr));
}

bool GuardTable::erase(std::span<const Word> key, std::uint64_t hash) {
  return impl_->erase(key, hash);
}

void GuardTable::clear() {
  has_kernels_.store(false, std::memory_order_relaxed);
  impl_->clear();
}

std::size_t GuardTable::size() const { return impl_->size(); }

std::size_t GuardTable::max_entries() const noexcept { return impl_->max_entries(); }

void GuardTable::for_each(
    const std::function<void(std::span<const Word>, Found, std::uint64_t calls)>& visit) const {
  impl_->for_each(visit);
}

}  // namespace eagercache
