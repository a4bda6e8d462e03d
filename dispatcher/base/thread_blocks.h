#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "dispatcher/base/locks.h"

namespace eagercache {

// One Block for each thread that asks. A block outlives its thread, with what it holds, and is the
// next new thread's. All are leaked: threads may count while static objects are destroyed.
// Any thread. Block is default-constructible and guards its own contents.
template <typename Block>
class ThreadBlocks {
 public:
  // The calling thread's; allocates at a thread's first call, and may throw std::bad_alloc there.
  static Block& own() {
    thread_local const Owner owner;
    return owner.slot.block;
  }

  // Calls `visit(Block&)` for every block, of threads that have ended too, under the list's lock.
  template <typename Visit>
  static void for_each(Visit visit) {
    Registry& all = registry();
    const Lock lock(all.mutex);
    for (const auto& slot : all.slots) {
      visit(slot->block);
    }
  }

 private:
  struct Slot {
    Block block;
    bool taken = true;  // guarded by Registry::mutex
  };

  struct Registry {
    Mutex mutex;
    std::vector<std::unique_ptr<Slot>> slots EAGERCACHE_GUARDED_BY(mutex);
  };

  static Registry& registry() {
    static auto* instance = new Registry();
    return *instance;
  }

  static Slot& take() {
    Registry& all = registry();
    const Lock lock(all.mutex);
    const auto free = std::ranges::find_if(all.slots, [](const auto& one) { return !one->taken; });
    if (free != all.slots.end()) {
      (*free)->taken = true;
      return **free;
    }
    all.slots.push_back(std::make_unique<Slot>());
    return *all.slots.back();
  }

  struct Owner {
    Slot& slot = take();
    Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    ~Owner() {
      const Lock lock(registry().mutex);
      slot.taken = false;
    }
  };
};

}  // namespace eagercache
