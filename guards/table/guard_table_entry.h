#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "guards/key/call_key.h"
#include "guards/table/epoch.h"

// What GuardTable's slots point to, and the slots themselves.
namespace eagercache {

enum class EntryState : std::uint8_t {
  kAbsent,   // never met, or forgotten
  kPending,  // met; native answers until a verdict arrives
  kKernel,   // `kernel` answers
  kNative,   // decided: native answers
};

// What the table knows of a key, by value: nothing in it can dangle.
struct Found {
  EntryState state = EntryState::kAbsent;
  // kKernel only. Kernels are never freed, so the pointer stays good after the entry is gone.
  const void* kernel = nullptr;
};

}  // namespace eagercache

// Private to GuardTable.
namespace eagercache::guard_table_detail {

// State and kernel in one word, so that a reader sees a pair that belongs together. Addresses of
// user space leave the upper bits free, and a shift (not a tag in the low bits) asks no alignment
// of the kernel. 0 is no verdict of an entry.
class Verdict {
 public:
  static constexpr unsigned kStateBits = 2;

  constexpr Verdict() noexcept = default;
  Verdict(EntryState state, const void* kernel) noexcept
      : word_(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(kernel)) << kStateBits |
              static_cast<std::uint64_t>(state)) {}

  Found found() const noexcept {
    return {
        static_cast<EntryState>(word_ & ((1U << kStateBits) - 1)),
        reinterpret_cast<const void*>(word_ >> kStateBits)};  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  std::uint64_t word_ = 0;
};
static_assert(static_cast<unsigned>(EntryState::kNative) < 1U << Verdict::kStateBits);
static_assert(std::atomic<Verdict>::is_always_lock_free);

// One key with its verdict; the key's words follow the object in the same allocation. Key and hash
// never change. Allocated on a cache line boundary: what only writers touch fills the first line,
// what find() reads starts the second.
struct Entry : Retired {
  // Guarded by the table's lock.
  Entry* older = nullptr;
  Entry* newer = nullptr;
  bool decided = false;            // in the queue of decided entries, not of pending ones
  std::uint32_t checked_tick = 0;  // `tick` when eviction last looked

  mutable std::atomic<std::uint64_t> calls{0};  // that were noted as missed
  std::uint64_t line_end[3] = {};               // fills the line

  std::uint64_t hash = 0;
  std::atomic<Verdict> verdict{};
  mutable std::atomic<std::uint32_t> tick{0};  // of the last use
  std::uint32_t size = 0;                      // words

  constexpr explicit Entry(std::uint32_t words) noexcept : size(words) {}

  // Null without memory.
  static Entry* make(std::span<const Word> key, std::uint64_t hash) noexcept;
  static void free(Retired* entry) noexcept;

  // Marks the entry as used now. The caller is in a read section or holds the table's lock.
  void touch(std::uint32_t now) const noexcept {
    if (tick.load(std::memory_order_relaxed) != now) {
      tick.store(now, std::memory_order_relaxed);
    }
  }

  Word* words() noexcept { return reinterpret_cast<Word*>(this + 1); }
  const Word* words() const noexcept { return reinterpret_cast<const Word*>(this + 1); }
  std::size_t bytes() const noexcept { return sizeof(Entry) + size * sizeof(Word); }

  bool is(std::span<const Word> key, std::uint64_t key_hash) const noexcept {
    if (hash != key_hash || size != key.size()) return false;
    const Word* const mine = words();
    const Word* const theirs = key.data();
    Word difference = 0;
    for (std::size_t i = 0, count = key.size(); i < count; ++i) difference |= mine[i] ^ theirs[i];
    return difference == 0;
  }
};

// Stands in a slot whose entry is gone where probes must go on. Equal to no key: none is so long.
inline constexpr std::uint32_t kTombstoneSize = UINT32_MAX;
extern Entry tombstone;

// A published array of slots. Readers probe from hash & mask to the first null slot; at least half
// of the slots are null.
struct Slots : Retired {
  std::size_t mask = 0;

  static Slots* make(std::size_t capacity) noexcept;  // a power of two; null without memory
  static void free(Retired* slots) noexcept;

  std::atomic<Entry*>* begin() noexcept { return reinterpret_cast<std::atomic<Entry*>*>(this + 1); }
  const std::atomic<Entry*>* begin() const noexcept {
    return reinterpret_cast<const std::atomic<Entry*>*>(this + 1);
  }
  std::size_t capacity() const noexcept { return mask + 1; }
  std::size_t bytes() const noexcept {
    return sizeof(Slots) + capacity() * sizeof(std::atomic<Entry*>);
  }

  Entry* probe(std::span<const Word> key, std::uint64_t hash) const noexcept {
    const std::atomic<Entry*>* const slots = begin();
    for (std::size_t i = hash & mask;; i = (i + 1) & mask) {
      Entry* const entry = slots[i].load(std::memory_order_seq_cst);
      if (entry == nullptr || entry->is(key, hash)) return entry;
    }
  }
};

// Entries in the order of their last known use. Intrusive; guarded by the table's lock.
class Queue {
 public:
  bool empty() const noexcept { return oldest_ == nullptr; }
  std::size_t size() const noexcept { return size_; }
  Entry* oldest() const noexcept { return oldest_; }
  void push_newest(Entry* entry) noexcept;
  void remove(Entry* entry) noexcept;

 private:
  Entry* oldest_ = nullptr;
  Entry* newest_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace eagercache::guard_table_detail
