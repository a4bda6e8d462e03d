#include "kernel_cache/loading/shared_library.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "tests/kernel_cache/test_objects.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

TEST(SharedLibraryTest, LoadsAndFindsSymbols) {
  TemporaryDirectory directory;
  write_bytes(directory.path() / "a.so", answer_object(42));
  const auto library = SharedLibrary::open(directory.path() / "a.so");
  ASSERT_TRUE(library) << library.status().to_string();
  EXPECT_EQ(ask(library.value()), 42U);
  EXPECT_EQ(library->symbol("no_such_symbol"), nullptr);
}

TEST(SharedLibraryTest, WhatCannotBeLoadedSaysWhyAndIsNotCounted) {
  TemporaryDirectory directory;
  write_bytes(directory.path() / "bad.so", "not a library");
  const std::size_t before = SharedLibrary::loaded_count();
  const auto library = SharedLibrary::open(directory.path() / "bad.so");
  EXPECT_EQ(library.code(), StatusCode::kIncompatible);
  EXPECT_NE(library.status().message().find("bad.so"), std::string::npos);
  EXPECT_FALSE(SharedLibrary::open(directory.path() / "missing.so"));
  EXPECT_EQ(SharedLibrary::loaded_count(), before);
}

TEST(SharedLibraryTest, APathIsCountedOnceHoweverManyThreadsOpenIt) {
  TemporaryDirectory directory;
  write_bytes(directory.path() / "a.so", answer_object(1));
  const std::size_t before = SharedLibrary::loaded_count();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto library = SharedLibrary::open(directory.path() / "a.so");
      ASSERT_TRUE(library);
      EXPECT_EQ(ask(library.value()), 1U);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(SharedLibrary::loaded_count(), before + 1);
}

// mmap fails: by a limit, since the loader's own calls cannot be intercepted.
TEST(SharedLibraryTest, WhereNothingMoreCanBeMappedTheLoadFailsAndTheProcessGoesOn) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "NOT RUN: a sanitizer's shadow memory knows no limit";
#endif
  TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "a.so";
  write_bytes(path, answer_object(5));
  EXPECT_EQ(run_in_child([&] {
              struct rlimit before {};
              ::getrlimit(RLIMIT_AS, &before);
              struct rlimit none = before;
              none.rlim_cur = 0;
              ::setrlimit(RLIMIT_AS, &none);
              const auto refused = SharedLibrary::open(path);
              ::setrlimit(RLIMIT_AS, &before);
              if (refused.code() != StatusCode::kIncompatible) return 1;
              const auto library = SharedLibrary::open(path);
              return library && ask(library.value()) == 5 ? 0 : 2;
            }),
            0);
}

// On one thread; under ThreadSanitizer, which reads every library each time, it takes a minute.
#if !defined(__SANITIZE_THREAD__)
TEST(SharedLibraryTest, TheCapHoldsAndTheProcessGoesOn) {
  TemporaryDirectory directory;
  const std::size_t cap = SharedLibrary::max_loaded();
  ASSERT_GE(cap, 100U);
  ASSERT_LE(cap, 2000U);
  const std::filesystem::path last = directory.path() / "last.so";
  std::size_t loaded = SharedLibrary::loaded_count();
  for (std::uint64_t i = 0; loaded < cap; ++i, ++loaded) {
    const std::filesystem::path path = directory.path() / (std::to_string(i) + ".so");
    write_bytes(path, answer_object(i));
    const auto library = SharedLibrary::open(path);
    ASSERT_TRUE(library) << library.status().to_string();
    ASSERT_EQ(ask(library.value()), i);
  }
  write_bytes(last, answer_object(999));
  EXPECT_EQ(SharedLibrary::open(last).code(), StatusCode::kFull);
  EXPECT_EQ(SharedLibrary::loaded_count(), cap);
  // What is loaded stays usable at the cap.
  EXPECT_TRUE(SharedLibrary::open(directory.path() / "0.so"));

  std::ifstream maps("/proc/self/maps");
  std::size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  std::size_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  EXPECT_LT(lines, most / 2);
}
#endif  // !defined(__SANITIZE_THREAD__)

}  // namespace
}  // namespace eagercache
