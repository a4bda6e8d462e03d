#include "guards/table/guard_table_entry.h"

#include <memory>
#include <new>

namespace eagercache::guard_table_detail {
namespace {

constexpr std::align_val_t kCacheLine{64};

}  // namespace

// find() reads from `hash` on; the words follow `size` at once.
static_assert(sizeof(Entry) == 64 + 24);

constinit Entry tombstone{kTombstoneSize};

Entry* Entry::make(std::span<const Word> key, std::uint64_t hash) noexcept {
  if (key.size() >= kTombstoneSize) return nullptr;
  void* const memory = ::operator new(sizeof(Entry) + key.size_bytes(), kCacheLine, std::nothrow);
  if (memory == nullptr) return nullptr;
  auto* const entry = new (memory) Entry(static_cast<std::uint32_t>(key.size()));
  entry->hash = hash;
  std::uninitialized_copy(key.begin(), key.end(), entry->words());
  return entry;
}

void Entry::free(Retired* entry) noexcept {
  auto* const self = static_cast<Entry*>(entry);
  self->~Entry();
  ::operator delete(self, kCacheLine);
}

Slots* Slots::make(std::size_t capacity) noexcept {
  const std::size_t bytes = sizeof(Slots) + capacity * sizeof(std::atomic<Entry*>);
  void* const memory = ::operator new(bytes, kCacheLine, std::nothrow);
  if (memory == nullptr) return nullptr;
  auto* const slots = new (memory) Slots;
  slots->mask = capacity - 1;
  std::uninitialized_value_construct_n(slots->begin(), capacity);
  return slots;
}

void Slots::free(Retired* slots) noexcept {
  auto* const self = static_cast<Slots*>(slots);
  self->~Slots();
  ::operator delete(self, kCacheLine);
}

void Queue::push_newest(Entry* entry) noexcept {
  entry->older = newest_;
  entry->newer = nullptr;
  (newest_ != nullptr ? newest_->newer : oldest_) = entry;
  newest_ = entry;
  ++size_;
}

void Queue::remove(Entry* entry) noexcept {
  (entry->older != nullptr ? entry->older->newer : oldest_) = entry->newer;
  (entry->newer != nullptr ? entry->newer->older : newest_) = entry->older;
  --size_;
}

}  // namespace eagercache::guard_table_detail
