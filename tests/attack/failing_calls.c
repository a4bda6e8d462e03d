// Loaded before libc (LD_PRELOAD): file calls below one folder fail with EIO.
//
// FAILING_BELOW is the folder, FAILING_AT the number of the first call that fails (from 1; 0 for
// none), FAILING_ALL whether those after it fail too, and FAILING_COUNT a file to which the number
// of calls is written when the process ends. All are read at each call, so that a process forked
// from one that has this library already gets its own.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FILES 4096

static atomic_long calls;
static atomic_char below[MOST_FILES];  // descriptors of files below the folder

static int concerns_path(int folder, const char* path) {
  const char* root = getenv("FAILING_BELOW");
  if (!root || !path) return 0;
  if (path[0] == '/') return strncmp(path, root, strlen(root)) == 0;
  return folder >= 0 && folder < MOST_FILES && below[folder];
}

static int concerns(int file) {
  return getenv("FAILING_BELOW") && file >= 0 && file < MOST_FILES && below[file];
}

// A folder may be reached step by step, each from the one above, so the kernel is asked where it is.
static void note(int file) {
  const char* root = getenv("FAILING_BELOW");
  if (!root || file < 0 || file >= MOST_FILES) return;
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(name, path, sizeof path - 1);
  below[file] = length >= (ssize_t)strlen(root) && strncmp(path, root, strlen(root)) == 0;
}

static int fails(void) {
  const char* text = getenv("FAILING_AT");
  const long first = text ? atol(text) : 0;
  const long number = ++calls;
  if (first == 0 || (getenv("FAILING_ALL") ? number < first : number != first)) return 0;
  errno = EIO;
  return 1;
}

__attribute__((destructor)) static void say(void) {
  const char* path = getenv("FAILING_COUNT");
  FILE* file = path ? fopen(path, "w") : NULL;
  if (file) {
    fprintf(file, "%ld", (long)calls);
    fclose(file);
  }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name, parameters, given, folder)                    \
  int name parameters {                                           \
    mode_t mode = 0;                                              \
    if (flags & (O_CREAT | O_TMPFILE)) {                          \
      va_list rest;                                               \
      va_start(rest, flags);                                      \
      mode = va_arg(rest, mode_t);                                \
      va_end(rest);                                               \
    }                                                             \
    if (concerns_path(folder, path) && fails()) return -1;        \
    const int file = REAL(name) given;                            \
    const int problem = errno;                                    \
    note(file);                                                   \
    errno = problem;                                              \
    return file;                                                  \
  }

OPENS(open, (const char* path, int flags, ...), (path, flags, mode), -1)
OPENS(open64, (const char* path, int flags, ...), (path, flags, mode), -1)
OPENS(openat, (int at, const char* path, int flags, ...), (at, path, flags, mode), at)
OPENS(openat64, (int at, const char* path, int flags, ...), (at, path, flags, mode), at)

int close(int file) {
  if (file >= 0 && file < MOST_FILES) below[file] = 0;
  return REAL(close)(file);
}

#define OF_FILE(type, name, parameters, given) \
  type name parameters {                       \
    if (concerns(file) && fails()) return -1;  \
    return REAL(name) given;                   \
  }

OF_FILE(ssize_t, read, (int file, void* data, size_t size), (file, data, size))
OF_FILE(ssize_t, pread, (int file, void* data, size_t size, off_t at), (file, data, size, at))
OF_FILE(ssize_t, pread64, (int file, void* data, size_t size, off64_t at), (file, data, size, at))
OF_FILE(ssize_t, write, (int file, const void* data, size_t size), (file, data, size))
OF_FILE(ssize_t, pwrite, (int file, const void* data, size_t size, off_t at),
        (file, data, size, at))
OF_FILE(ssize_t, pwrite64, (int file, const void* data, size_t size, off64_t at),
        (file, data, size, at))
OF_FILE(ssize_t, writev, (int file, const struct iovec* parts, int count), (file, parts, count))
OF_FILE(int, fsync, (int file), (file))
OF_FILE(int, fdatasync, (int file), (file))
OF_FILE(int, ftruncate, (int file, off_t size), (file, size))
OF_FILE(int, ftruncate64, (int file, off64_t size), (file, size))
OF_FILE(int, fstat, (int file, struct stat* out), (file, out))
OF_FILE(int, fstat64, (int file, struct stat64* out), (file, out))
OF_FILE(int, fchmod, (int file, mode_t mode), (file, mode))
OF_FILE(int, flock, (int file, int how), (file, how))

#define OF_PATH(name, parameters, given, folder, path)            \
  int name parameters {                                           \
    if (concerns_path(folder, path) && fails()) return -1;        \
    return REAL(name) given;                                      \
  }

OF_PATH(stat, (const char* path, struct stat* out), (path, out), -1, path)
OF_PATH(stat64, (const char* path, struct stat64* out), (path, out), -1, path)
OF_PATH(lstat, (const char* path, struct stat* out), (path, out), -1, path)
OF_PATH(lstat64, (const char* path, struct stat64* out), (path, out), -1, path)
OF_PATH(fstatat, (int at, const char* path, struct stat* out, int flags), (at, path, out, flags),
        at, path)
OF_PATH(fstatat64, (int at, const char* path, struct stat64* out, int flags),
        (at, path, out, flags), at, path)
OF_PATH(statx, (int at, const char* path, int flags, unsigned mask, struct statx* out),
        (at, path, flags, mask, out), at, path)
OF_PATH(access, (const char* path, int mode), (path, mode), -1, path)
OF_PATH(mkdir, (const char* path, mode_t mode), (path, mode), -1, path)
OF_PATH(mkdirat, (int at, const char* path, mode_t mode), (at, path, mode), at, path)
OF_PATH(unlink, (const char* path), (path), -1, path)
OF_PATH(unlinkat, (int at, const char* path, int flags), (at, path, flags), at, path)
OF_PATH(rmdir, (const char* path), (path), -1, path)
OF_PATH(rename, (const char* from, const char* to), (from, to), -1, to)
OF_PATH(renameat, (int at, const char* from, int there, const char* to), (at, from, there, to),
        there, to)
OF_PATH(renameat2, (int at, const char* from, int there, const char* to, unsigned flags),
        (at, from, there, to, flags), there, to)
OF_PATH(link, (const char* from, const char* to), (from, to), -1, to)
OF_PATH(linkat, (int at, const char* from, int there, const char* to, int flags),
        (at, from, there, to, flags), there, to)
OF_PATH(utimensat, (int at, const char* path, const struct timespec times[2], int flags),
        (at, path, times, flags), at, path)
OF_PATH(chmod, (const char* path, mode_t mode), (path, mode), -1, path)
