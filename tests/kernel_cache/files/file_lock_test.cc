#include "kernel_cache/files/file_lock.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include "tests/support/child_process.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

class FileLockTest : public testing::Test {
 protected:
  FileLockTest() : fd_(::open(directory_.path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {}
  ~FileLockTest() override { ::close(fd_); }

  Result<FileLock> acquire(const char* name = "lock") const {
    return FileLock::try_acquire(FileLayer::posix(), fd_, name);
  }

  TemporaryDirectory directory_;
  int fd_;
};

TEST_F(FileLockTest, OnlyOneHolderAlsoInOneProcess) {
  std::optional<FileLock> first(acquire().value());
  EXPECT_TRUE(first->held());
  EXPECT_EQ(acquire().code(), StatusCode::kBusy);
  EXPECT_TRUE(acquire("another"));
  first.reset();
  EXPECT_TRUE(acquire());
}

TEST_F(FileLockTest, MovingHandsTheLockOver) {
  FileLock first = acquire().value();
  FileLock second = std::move(first);
  EXPECT_FALSE(first.held());
  EXPECT_TRUE(second.held());
  EXPECT_EQ(acquire().code(), StatusCode::kBusy);
  second.release();
  second.release();
  EXPECT_TRUE(acquire());
}

TEST_F(FileLockTest, TheFileIsPrivateWhateverTheUmaskAndIsNeverDeleted) {
  const mode_t before = ::umask(0777);
  { const FileLock lock = acquire().value(); }
  ::umask(before);
  struct stat info {};
  ASSERT_EQ(::stat((directory_.path() / "lock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
  EXPECT_TRUE(acquire());
}

TEST_F(FileLockTest, LinksPipesAndDirectoriesAreNotLocked) {
  const std::filesystem::path victim = directory_.path() / "victim";
  std::filesystem::create_symlink(victim, directory_.path() / "link");
  EXPECT_FALSE(acquire("link"));
  EXPECT_FALSE(std::filesystem::exists(victim));
  ASSERT_EQ(::mkfifo((directory_.path() / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(acquire("pipe").code(), StatusCode::kRefused);
  std::filesystem::create_directory(directory_.path() / "directory");
  EXPECT_FALSE(acquire("directory"));
}

TEST_F(FileLockTest, AForkedChildNeitherHoldsNorReleasesItsParentsLock) {
  std::optional<FileLock> lock(acquire().value());
  EXPECT_EQ(run_in_child([&] {
              if (lock->held()) return 1;
              lock.reset();
              // Still the parent's.
              return acquire().code() == StatusCode::kBusy ? 0 : 2;
            }),
            0);
  EXPECT_TRUE(lock->held());
  EXPECT_EQ(acquire().code(), StatusCode::kBusy);
}

TEST_F(FileLockTest, AChildThatOutlivesTheHoldersReleaseDoesNotKeepTheLock) {
  std::optional<FileLock> lock(acquire().value());
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  lock.reset();
  EXPECT_TRUE(acquire());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

// A holder with a child that it only forked, and one that runs another program, like a compiler.
// The death of the holder alone frees the lock; bench/store has the time it takes.
TEST_F(FileLockTest, AKilledHolderFreesTheLockThoughItsChildrenLive) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const auto lock = acquire();
    pid_t children[2] = {::fork(), 0};
    if (children[0] == 0) {
      ::alarm(120);
      ::pause();
      ::_exit(0);
    }
    children[1] = ::fork();
    if (children[1] == 0) {
      ::execl("/bin/sleep", "sleep", "120", static_cast<char*>(nullptr));
      ::_exit(1);
    }
    const bool told = lock.is_ok() && ::write(ready[1], children, sizeof children) > 0;
    if (told) ::pause();
    ::_exit(1);
  }
  pid_t children[2] = {0, 0};
  ASSERT_EQ(::read(ready[0], children, sizeof children), static_cast<ssize_t>(sizeof children));
  EXPECT_EQ(acquire().code(), StatusCode::kBusy);

  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
  // A child gives the lock up when it first runs, which a loaded machine may put off.
  const auto start = std::chrono::steady_clock::now();
  bool free = false;
  while (!free && std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) {
    free = acquire().is_ok();
  }
  EXPECT_TRUE(free);
  for (const pid_t child : children) {
    EXPECT_EQ(::kill(child, 0), 0) << "a child died, so this showed nothing";
    ::kill(child, SIGKILL);
  }
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(FileLockTest, ManyThreadsShareOneLockOneAtATime) {
  // Atomic for the thread sanitizer, which does not know file locks; counted in two steps, so that
  // two holders would lose a count.
  std::atomic<int> counter{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int done = 0; done < 200;) {
        auto lock = acquire();
        if (!lock) {
          std::this_thread::yield();
          continue;
        }
        const int before = counter;
        std::this_thread::yield();
        counter = before + 1;
        ++done;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counter, 800);
}

}  // namespace
}  // namespace eagercache
