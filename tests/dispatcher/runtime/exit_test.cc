// Programs that end without shut_down(), each a process of its own: this executable again, told to
// play the program of the test that started it.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/dispatcher/hook_fixture.h"

namespace eagercache {
namespace {

// Set in a process that plays the program.
constexpr char kPlays[] = "TEST_PLAYS_A_PROGRAM";
constexpr int kPrograms = 2;
constexpr int kThreads = 2;
// The exit code of a program in which threads of ours still work when libcrypto cleans up.
constexpr int kStillWorks = 3;

class ExitTest : public HookTest {
 protected:
  ExitTest() {
    // The program's own use of libcrypto, whose clean-up is registered by it.
    OPENSSL_init_crypto(0, nullptr);
  }

  static bool plays() { return ::getenv(kPlays) != nullptr; }

  // How a process that plays this test's program ended: its exit code, or 128 + the signal.
  static int end_of_program() {
    const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
    std::string filter = std::string("--gtest_filter=ExitTest.") + test.name();
    std::string self = "/proc/self/exe";
    char* arguments[] = {self.data(), filter.data(), nullptr};
    // Its directories go with ours, for it removes nothing.
    const TemporaryDirectory directory;
    std::string place = "TMPDIR=" + directory.path().string();
    std::string mark(kPlays);
    mark += "=1";  // g++ 12 warns of a sum of both
    std::vector<char*> environment = {place.data(), mark.data()};
    for (char** variable = environ; *variable != nullptr; ++variable) {
      if (!std::string_view(*variable).starts_with("TMPDIR=")) environment.push_back(*variable);
    }
    environment.push_back(nullptr);
    pid_t child = 0;
    EXPECT_EQ(::posix_spawn(&child, self.c_str(), nullptr, nullptr, arguments, environment.data()),
              0);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
};

TEST_F(ExitTest, AProgramMayEndWhileTheLoaderWorks) {
  for (int i = 0; !plays() && i < kPrograms; ++i) {
    EXPECT_EQ(end_of_program(), 0);
  }
  if (!plays()) {
    return;
  }
  hook("eagercache_test::twice");
  use_store();
  set_on_miss(OnMiss::kBackground, 1);
  // Runs just before libcrypto's handler, which was registered before it.
  std::atexit([] {
    if (runtime().outstanding() != 0) ::_exit(kStillWorks);
  });
  runtime().stop_at_exit();
  for (std::int64_t size = 1; size <= 3'000; ++size) {
    call("eagercache_test::twice", at::ones({size}));
  }
  ASSERT_GT(runtime().outstanding(), 100U);
  std::exit(0);
}

TEST_F(ExitTest, AProgramMayEndWhileItsThreadsAskTheStore) {
  for (int i = 0; !plays() && i < kPrograms; ++i) {
    EXPECT_EQ(end_of_program(), 0);
  }
  if (!plays()) {
    return;
  }
  OperatorHook& twice = hook("eagercache_test::twice");
  use_store();
  std::vector<std::vector<Word>> keys;
  for (std::int64_t size = 1; size <= 100; ++size) {
    keys.push_back(key_of(twice, {at::ones({size})}));
  }
  static std::atomic<int> asked{0};
  std::atexit([] {
    const int before = asked;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    // What a thread was told before may be counted late, once.
    if (asked > before + kThreads) ::_exit(kStillWorks);
  });
  runtime().stop_at_exit();
  for (int thread = 0; thread < kThreads; ++thread) {
    // No operator runs in these threads: what torch takes down at exit is not their concern.
    std::thread([&twice, keys] {
      for (std::size_t i = 0;; ++i) {
        const std::vector<Word>& words = keys[i % keys.size()];
        const std::uint64_t hash = hash_words(words);
        Runtime::instance().load_now(twice, words, hash);
        asked += twice.table().find(words, hash).state == EntryState::kNative ? 1 : 0;
        twice.table().erase(words, hash);
      }
    }).detach();
  }
  while (asked < 50) {
    std::this_thread::yield();
  }
  std::exit(0);
}

}  // namespace
}  // namespace eagercache
