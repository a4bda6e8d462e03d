#include <pthread.h>

#include <algorithm>
#include <mutex>

#include "guards/table/guard_table_impl.h"

// What concerns all tables of the process: fork(), and the budget that they share.
namespace eagercache {
namespace {

// What one inserting call pays at most, when tables together have become too large: looks at all
// tables, and entries forgotten after each.
constexpr int kMaxRounds = 4;
constexpr std::size_t kMaxForgotten = 64;
// Per table and look. Every table is looked at, so few.
constexpr std::size_t kSecondChances = 4;
// With more slots than this for each entry, a table whose entries were forgotten gives slots back.
constexpr std::size_t kMaxSlotsPerEntry = 16;

}  // namespace

void GuardTable::Impl::AllTables::add(Impl* table) {
  const std::lock_guard lock(mutex());
  static const int kRegistered = pthread_atfork(before, after, after);
  (void)kRegistered;
  table->next_ = first_;
  if (first_ != nullptr) first_->previous_ = table;
  first_ = table;
}

void GuardTable::Impl::AllTables::remove(Impl* table) noexcept {
  const std::lock_guard lock(mutex());
  (table->previous_ != nullptr ? table->previous_->next_ : first_) = table->next_;
  if (table->next_ != nullptr) table->next_->previous_ = table->previous_;
}

std::mutex& GuardTable::Impl::AllTables::mutex() noexcept {
  static auto* const kMutex = new std::mutex;  // outlives every table with static storage
  return *kMutex;
}

void GuardTable::Impl::AllTables::before() noexcept {
  mutex().lock();
  for (auto* table = first_; table != nullptr; table = table->next_) table->mutex_.lock();
}

void GuardTable::Impl::AllTables::after() noexcept {
  for (auto* table = first_; table != nullptr; table = table->next_) table->mutex_.unlock();
  mutex().unlock();
}

void GuardTable::Impl::AllTables::make_room(const TableBudget& budget) noexcept {
  const std::unique_lock lock(mutex(), std::try_to_lock);
  for (int round = 0; round < kMaxRounds && lock.owns_lock() && budget.exceeded(); ++round) {
    take_from_oldest_locked(budget);
  }
}

// Takes from the table with the oldest entry, down to the age of the next table's oldest.
void GuardTable::Impl::AllTables::take_from_oldest_locked(const TableBudget& budget) noexcept {
  Impl* oldest = nullptr;
  std::int64_t oldest_age = -1;
  std::int64_t next_age = -1;
  for (Impl* table = first_; table != nullptr; table = table->next_) {
    if (&table->budget_ != &budget) continue;
    const std::unique_lock table_lock(table->mutex_, std::try_to_lock);
    if (!table_lock.owns_lock()) continue;
    const std::int64_t age = table->age();
    if (age > oldest_age) {
      next_age = oldest_age;
      oldest_age = age;
      oldest = table;
    } else {
      next_age = std::max(next_age, age);
    }
  }
  if (oldest == nullptr) return;
  const std::unique_lock table_lock(oldest->mutex_, std::try_to_lock);
  if (table_lock.owns_lock()) oldest->forget_older(next_age, kMaxForgotten);
}

std::int64_t GuardTable::Impl::age() noexcept {
  std::int64_t most = -1;
  for (Queue* queue : {&pending_, &decided_}) {
    if (queue->empty()) continue;
    const Entry* const entry = oldest(*queue, kSecondChances);
    // Ticks wrap; one that another thread has just stored may be ahead of the one read here.
    const auto ticks =
        static_cast<std::int32_t>(budget_.tick() - entry->tick.load(std::memory_order_relaxed));
    most = std::max<std::int64_t>(most, std::max(ticks, 0));
  }
  return most;
}

void GuardTable::Impl::forget_older(std::int64_t least_age, std::size_t count) noexcept {
  for (; count != 0 && budget_.exceeded(); --count) {
    const std::int64_t most = age();
    if (most < 0 || most < least_age) break;
    const auto ticks_of = [this](const Entry* entry) {
      return budget_.tick() - entry->tick.load(std::memory_order_relaxed);
    };
    const bool from_decided =
        pending_.empty() ||
        (!decided_.empty() && ticks_of(decided_.oldest()) > ticks_of(pending_.oldest()));
    unlink((from_decided ? decided_ : pending_).oldest());
  }
  if (slots()->capacity() > kMaxSlotsPerEntry * (size() + 1)) rebuild();
  collect_if_due();
}

}  // namespace eagercache
