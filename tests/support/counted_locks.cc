#include "tests/support/counted_locks.h"

#include <dlfcn.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <system_error>

namespace {

thread_local std::size_t locks = 0;

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

struct Watched {
  const std::function<void()>& prepare;
  const std::function<void()>& work;
  std::atomic<bool> prepared{false};
  std::atomic<bool> done{false};
};

// Ends by the one system call that is left to it: nothing of the thread's may be torn down.
void* run_watched(void* argument) {
  auto& watched = *static_cast<Watched*>(argument);
  watched.prepare();
  if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0) {
    watched.prepared = true;
    watched.work();
    watched.done = true;
  }
  syscall(SYS_exit, 0);
  return nullptr;
}

}  // namespace

extern "C" {

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static auto* const real = next<int(pthread_mutex_t*)>("pthread_mutex_lock");
  ++locks;
  return real(mutex);
}

int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  static auto* const real = next<int(pthread_mutex_t*)>("pthread_mutex_trylock");
  ++locks;
  return real(mutex);
}

int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  static auto* const real = next<int(pthread_rwlock_t*)>("pthread_rwlock_rdlock");
  ++locks;
  return real(lock);
}

int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  static auto* const real = next<int(pthread_rwlock_t*)>("pthread_rwlock_wrlock");
  ++locks;
  return real(lock);
}
}

namespace eagercache {

std::size_t thread_locks() noexcept { return locks; }

bool makes_no_system_call(const std::function<void()>& prepare, const std::function<void()>& work) {
  Watched watched{prepare, work};
  pthread_t thread{};
  if (const int error = pthread_create(&thread, nullptr, &run_watched, &watched); error != 0) {
    throw std::system_error(error, std::generic_category(), "pthread_create");
  }
  pthread_join(thread, nullptr);
  if (!watched.prepared) {
    throw std::system_error(errno, std::generic_category(), "the kernel does not watch the thread");
  }
  return watched.done;
}

}  // namespace eagercache
