#include "guards/table/epoch.h"

#include <linux/membarrier.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

namespace eagercache {
namespace epoch_detail {

GlobalEpoch global_epoch;
std::atomic<bool> membarrier_ready{false};
constinit thread_local ReaderSlot* this_thread_slot __attribute__((tls_model("initial-exec"))) =
    nullptr;

namespace {

std::atomic<ReaderSlot*> all_slots{nullptr};

bool membarrier(int command) noexcept {
  return !kThreadSanitizer && syscall(__NR_membarrier, command, 0, 0) == 0;
}

void release_slot(void* slot) noexcept {
  this_thread_slot = nullptr;
  static_cast<ReaderSlot*>(slot)->epoch.store(0, std::memory_order_release);
  static_cast<ReaderSlot*>(slot)->in_use.store(false, std::memory_order_release);
}

void after_fork_in_child() noexcept {
  for (ReaderSlot* slot = all_slots.load(); slot != nullptr; slot = slot->next) {
    if (slot == this_thread_slot) continue;
    slot->epoch.store(0);
    slot->in_use.store(false);
  }
  // A kernel may or may not hand the registration on. If this fails, barriers fail too, and then
  // nothing is freed any more. In a process of one thread it takes no time.
  if (membarrier_ready.load()) membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
}

void* register_membarrier(void* /*unused*/) noexcept {
  if (membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)) membarrier_ready.store(true);
  return nullptr;
}

// What the process sets up once, before its first reader.
struct Process {
  bool has_key = false;
  pthread_key_t key{};

  Process() noexcept {
    // A pthread key, not a thread_local object: its destructor runs after those of thread_local
    // objects, which may still make calls.
    has_key = pthread_key_create(&key, release_slot) == 0;
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  }
};

const Process& process() noexcept {
  static const Process kProcess;
  return kProcess;
}

ReaderSlot* take_free_slot() noexcept {
  for (ReaderSlot* slot = all_slots.load(std::memory_order_acquire); slot != nullptr;
       slot = slot->next) {
    bool in_use = false;
    if (slot->in_use.compare_exchange_strong(in_use, true)) return slot;
  }
  return nullptr;
}

ReaderSlot* add_slot() noexcept {
  auto* const slot = new (std::nothrow) ReaderSlot;
  if (slot == nullptr) return nullptr;
  slot->next = all_slots.load();
  while (!all_slots.compare_exchange_weak(slot->next, slot)) {
  }
  return slot;
}

}  // namespace

ReaderSlot* register_this_thread() noexcept {
  const Process& self = process();
  ReaderSlot* slot = take_free_slot();
  if (slot == nullptr) slot = add_slot();
  if (slot == nullptr) return nullptr;
  // Where this fails, the slot is not handed on when the thread ends: it stays empty, and harmless.
  if (self.has_key) pthread_setspecific(self.key, slot);
  this_thread_slot = slot;
  return slot;
}

}  // namespace epoch_detail

namespace {

// The oldest epoch in which some reader may be; the largest number when there is none. False when
// readers could not be ordered, so that nothing is known.
bool oldest_reader(std::uint64_t* oldest) noexcept {
  if (epoch_detail::membarrier_ready.load(std::memory_order_seq_cst) &&
      !epoch_detail::membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED)) {
    return false;
  }
  *oldest = UINT64_MAX;
  for (auto* slot = epoch_detail::all_slots.load(); slot != nullptr; slot = slot->next) {
    const std::uint64_t epoch = slot->epoch.load(std::memory_order_seq_cst);
    if (epoch != 0 && epoch < *oldest) *oldest = epoch;
  }
  return true;
}

}  // namespace

void Limbo::retire(Retired* object, std::size_t bytes) noexcept {
  object->next_retired = fresh_;
  fresh_ = object;
  ++fresh_count_;
  ++new_count_;
  new_bytes_ += bytes;
}

void Limbo::collect() noexcept {
  new_count_ = 0;
  new_bytes_ = 0;
  if (sealed_ == nullptr) {
    if (fresh_ == nullptr) return;
    sealed_ = fresh_;
    sealed_count_ = fresh_count_;
    sealed_epoch_ = epoch_detail::global_epoch.number.fetch_add(1, std::memory_order_seq_cst);
    fresh_ = nullptr;
    fresh_count_ = 0;
  }
  std::uint64_t oldest = 0;
  if (!oldest_reader(&oldest) || oldest <= sealed_epoch_) return;
  free_list(sealed_);
  sealed_ = nullptr;
  sealed_count_ = 0;
}

void Limbo::free_all() noexcept {
  free_list(fresh_);
  free_list(sealed_);
  fresh_ = nullptr;
  sealed_ = nullptr;
  fresh_count_ = 0;
  sealed_count_ = 0;
  new_count_ = 0;
  new_bytes_ = 0;
}

void Limbo::free_list(Retired* list) noexcept {
  while (list != nullptr) {
    Retired* const next = list->next_retired;
    free_(list);
    list = next;
  }
}

std::size_t epoch_reader_slots() noexcept {
  std::size_t count = 0;
  for (const auto* slot = epoch_detail::all_slots.load(); slot != nullptr; slot = slot->next) {
    ++count;
  }
  return count;
}

void prepare_epoch() noexcept {
  if (epoch_detail::kThreadSanitizer) return;
  static const bool kStarted = [] {
    epoch_detail::process();  // fork handlers first
    pthread_t thread{};
    const bool started =
        pthread_create(&thread, nullptr, epoch_detail::register_membarrier, nullptr) == 0;
    return started && pthread_detach(thread) == 0;
  }();
  (void)kStarted;
}

bool epoch_uses_membarrier() noexcept { return epoch_detail::membarrier_ready.load(); }

}  // namespace eagercache
