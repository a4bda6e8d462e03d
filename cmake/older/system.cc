// What a wheel for older systems (EAGERCACHE_PORTABLE) uses of libc that those do not have: each is
// what libc's own comes down to on x86-64. It is hidden in the library that it is linked into.
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

extern "C" {

// libstdc++ asks whether it may count references without atomics; there may always be threads.
char __libc_single_threaded = 0;  // NOLINT(bugprone-reserved-identifier)

pid_t gettid() noexcept { return static_cast<pid_t>(::syscall(SYS_gettid)); }

int fstatat(int folder, const char* path, struct stat* result, int flags) noexcept {
  return static_cast<int>(::syscall(SYS_newfstatat, folder, path, result, flags));
}

int stat(const char* path, struct stat* result) noexcept {
  return fstatat(AT_FDCWD, path, result, 0);
}

int lstat(const char* path, struct stat* result) noexcept {
  return fstatat(AT_FDCWD, path, result, AT_SYMLINK_NOFOLLOW);
}

int fstat(int file, struct stat* result) noexcept {
  return static_cast<int>(::syscall(SYS_fstat, file, result));
}

// Headers since libc 2.38 have these called for strtoll and strtoull, as C23 wants them: a number
// of base 0 or 2 may begin with "0b". Nothing here reads such numbers.
long long older_strtoll(const char* text, char** end, int base) noexcept __asm__("strtoll");
unsigned long long older_strtoull(const char* text, char** end, int base) noexcept
    __asm__("strtoull");
long long __isoc23_strtoll(  // NOLINT(bugprone-reserved-identifier)
    const char* text, char** end, int base) noexcept {
  return older_strtoll(text, end, base);
}
unsigned long long __isoc23_strtoull(  // NOLINT(bugprone-reserved-identifier)
    const char* text, char** end, int base) noexcept {
  return older_strtoull(text, end, base);
}

// A wait until a time of the steady clock: by the clock that every libc waits by, in parts short
// enough that a change of that clock is noticed.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  constexpr long long kSecond = 1000000000;
  constexpr long long kLongest = kSecond;
  const auto now = [](clockid_t which) {
    struct timespec time {};
    ::clock_gettime(which, &time);
    return time.tv_sec * kSecond + time.tv_nsec;
  };
  const long long left = until->tv_sec * kSecond + until->tv_nsec - now(clock);
  const long long part = left < 0 ? 0 : left < kLongest ? left : kLongest;
  const long long wakes = now(CLOCK_REALTIME) + part;
  const struct timespec then {
    static_cast<time_t>(wakes / kSecond), static_cast<long>(wakes % kSecond)
  };
  const int result = ::pthread_cond_timedwait(condition, mutex, &then);
  // A waiter may wake for no reason, and then asks again how long is left.
  return result == ETIMEDOUT && left > part ? 0 : result;
}
}
