#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

// When may memory be freed that readers reach without a lock? Epoch-based reclamation, made for
// readers that must cost a few nanoseconds and writers that may cost microseconds.
//
// Protocol. A process-wide epoch number E starts at 1. Every reading thread owns a ReaderSlot.
//   Reader: S  slot.epoch = E;  L  load shared pointers and use what they point to;  slot.epoch =
//   0. Writer: U  unlink an object, so that no load started later can find it;  then seal: e = E++;
//           M  make the readers' stores visible;  R  read every slot. Objects sealed with e are
//           freed when each slot holds 0 or a number above e.
//
// Why a reader never holds a freed object. Let it use an object sealed with e.
//   (1) It read E <= e at S. (Having read e + 1, written after U by a release operation, its later
//   L
//       could not have found the object.) So while it reads, its slot holds a number from 1 to e.
//   (2) The writer's R sees that number. What must be excluded is that R ran before S became
//   visible,
//       yet L before U did: the store-buffer pattern. With membarrier, M makes every running thread
//       of the process execute a full barrier between two of its instructions. Either S is before
//       that point, and R sees it; or L is after it, and sees U. In the reader only the compiler
//       must keep S before L. Without membarrier, and under ThreadSanitizer (which follows atomics
//       but no fences or system calls), S, L, U and R are sequentially consistent operations, whose
//       single order gives the same two cases. On x86-64 that costs something in S alone, so L, U
//       and R are always sequentially consistent.
//   (3) Leaving is a release store and R an acquire load, so all uses come before the free.
// Registering for membarrier waits for all processors (milliseconds once threads exist), so
// nobody's path does it: prepare_epoch() has a thread do it, and until `membarrier_ready` readers
// order their own stores. A reader that saw it true was preceded, in the single order of
// sequentially consistent operations, by every writer that saw it false, and so by that writer's U:
// its L, later still, sees U. Writers that saw it true use membarrier. A slot published after R's
// walk of the slots is covered too: its publication is a sequentially consistent operation after
// R's, so the reader's L, later still, sees U. A thread that stays inside delays frees, never
// correctness. Numbers of 64 bits do not wrap.
//
// Slots belong to threads, are handed on when a thread ends, and are never freed. In a forked child
// only the forking thread exists, so the child's fork handler empties all other slots.
namespace eagercache {

namespace epoch_detail {

inline constexpr bool kThreadSanitizer =
#if defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

// What one thread says to those who reclaim memory, on a cache line of its own. Never freed: a
// thread that begins takes over the slot of one that has ended.
struct alignas(64) ReaderSlot {
  std::atomic<std::uint64_t> epoch{0};  // 0: outside
  bool ordered_stores = true;           // S must be sequentially consistent; its thread's own
  std::atomic<bool> in_use{true};
  ReaderSlot* next = nullptr;  // written before the slot is published
};

// The number E, alone on its cache line: every reader reads it, only sealing writes it.
struct alignas(64) GlobalEpoch {
  std::atomic<std::uint64_t> number{1};
};
extern GlobalEpoch global_epoch;

// The process is registered for membarrier, and writers use it. Set once.
extern std::atomic<bool> membarrier_ready;

// This thread's slot, null before its first section. Initial-exec: one instruction, no call, and
// eight bytes of the static TLS that the loader keeps for late libraries.
extern constinit thread_local ReaderSlot* this_thread_slot
    __attribute__((tls_model("initial-exec")));

// Null only without memory.
ReaderSlot* register_this_thread() noexcept;

}  // namespace epoch_detail

// A section in which objects reached through shared pointers stay alive. Sections may nest. No
// lock, no system call, and no allocation but the slot of a thread's first section.
class ReadSection {
 public:
  ReadSection() noexcept : slot_(epoch_detail::this_thread_slot) {
    if (slot_ == nullptr) [[unlikely]] {
      slot_ = epoch_detail::register_this_thread();
      if (slot_ == nullptr) return;
    }
    outer_ = slot_->epoch.load(std::memory_order_relaxed);
    if (outer_ != 0) [[unlikely]]
      return;
    const std::uint64_t now = epoch_detail::global_epoch.number.load(std::memory_order_acquire);
    if (epoch_detail::kThreadSanitizer || slot_->ordered_stores) [[unlikely]] {
      slot_->epoch.store(now, std::memory_order_seq_cst);
      slot_->ordered_stores =
          !epoch_detail::membarrier_ready.load(std::memory_order_seq_cst);  // from the next one on
    } else {
      slot_->epoch.store(now, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
  }
  ~ReadSection() {
    if (slot_ != nullptr) slot_->epoch.store(outer_, std::memory_order_release);
  }
  ReadSection(const ReadSection&) = delete;
  ReadSection& operator=(const ReadSection&) = delete;

  // False without memory for a slot: nothing shared may be touched then.
  bool entered() const noexcept { return slot_ != nullptr; }

 private:
  epoch_detail::ReaderSlot* slot_;
  std::uint64_t outer_ = 0;
};

// Base of what is freed through a Limbo.
struct Retired {
  Retired* next_retired = nullptr;
};

// Unlinked objects of one owner until no reader can hold them. Not thread-safe: the owner's lock
// guards it. Allocates nothing.
class Limbo {
 public:
  using Free = void (*)(Retired*) noexcept;

  explicit Limbo(Free free) noexcept : free_(free) {}
  ~Limbo() { free_all(); }
  Limbo(const Limbo&) = delete;
  Limbo& operator=(const Limbo&) = delete;

  // Takes an object that no new reader can find any more. `bytes` is its size, for due().
  void retire(Retired* object, std::size_t bytes) noexcept;

  // Enough has gathered to make a collection worth its price (some microseconds).
  bool due() const noexcept { return new_bytes_ >= kDueBytes || new_count_ >= kDueCount; }

  // Frees what no reader can hold. Never waits.
  void collect() noexcept;

  // Frees everything at once. Requires that no reader can hold any of it.
  void free_all() noexcept;

  std::size_t size() const noexcept { return fresh_count_ + sealed_count_; }

 private:
  static constexpr std::size_t kDueCount = 64;
  static constexpr std::size_t kDueBytes = 256 * 1024;

  void free_list(Retired* list) noexcept;

  Free free_;
  Retired* fresh_ = nullptr;  // not sealed
  std::size_t fresh_count_ = 0;
  Retired* sealed_ = nullptr;  // sealed with sealed_epoch_, one batch at a time
  std::size_t sealed_count_ = 0;
  std::uint64_t sealed_epoch_ = 0;
  // Retired since the last collection, so that a reader that stays long does not make each of the
  // writer's steps collect in vain.
  std::size_t new_count_ = 0;
  std::size_t new_bytes_ = 0;
};

// Reader slots made so far: the largest number of threads that were reading threads at one time.
std::size_t epoch_reader_slots() noexcept;

// Starts the registration for membarrier in a thread of its own, once a process. Without it, and
// until it is done, sections are right and cost some nanoseconds more.
void prepare_epoch() noexcept;

// True when writers order readers by membarrier, false when readers do it by their own stores.
bool epoch_uses_membarrier() noexcept;

}  // namespace eagercache
