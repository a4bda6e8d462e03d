#pragma once

// Locks whose use clang checks: a member that is EAGERCACHE_GUARDED_BY(mutex) is touched with that
// mutex held, or `clang++ -Wthread-safety` says where it is not. Other compilers see a std::mutex
// and a std::unique_lock, and no cost beside them. A Mutex belongs to the object whose members it
// guards; any thread may lock it.

#include <condition_variable>
#include <mutex>
#include <utility>

#if defined(__clang__)
#define EAGERCACHE_LOCK_ATTRIBUTE(attribute) __attribute__((attribute))
#else
#define EAGERCACHE_LOCK_ATTRIBUTE(attribute)
#endif

// Of a member: the mutex with which it is read and written.
#define EAGERCACHE_GUARDED_BY(mutex) EAGERCACHE_LOCK_ATTRIBUTE(guarded_by(mutex))
// Of a function: the caller holds the mutex. Behind a lambda's parameters too, which clang takes
// for a function of its own.
#define EAGERCACHE_REQUIRES(mutex) EAGERCACHE_LOCK_ATTRIBUTE(exclusive_locks_required(mutex))

namespace eagercache {

class EAGERCACHE_LOCK_ATTRIBUTE(capability("mutex")) Mutex {
 private:
  friend class Lock;
  std::mutex mutex_;
};

// Holds a mutex for a block.
class EAGERCACHE_LOCK_ATTRIBUTE(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) EAGERCACHE_LOCK_ATTRIBUTE(exclusive_lock_function(mutex))
      : lock_(mutex.mutex_) {}
  ~Lock() EAGERCACHE_LOCK_ATTRIBUTE(unlock_function()) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // As the condition's own, which let go of the mutex meanwhile and hold it again afterwards.
  template <typename Ready>
  void wait(std::condition_variable& condition, Ready ready) {
    condition.wait(lock_, std::move(ready));
  }
  template <typename Duration, typename Ready>
  bool wait_for(std::condition_variable& condition, const Duration& limit, Ready ready) {
    return condition.wait_for(lock_, limit, std::move(ready));
  }
  template <typename Time, typename Ready>
  bool wait_until(std::condition_variable& condition, const Time& end, Ready ready) {
    return condition.wait_until(lock_, end, std::move(ready));
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace eagercache
