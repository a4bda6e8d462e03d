// A kernel that kills the process which loads it, or runs it for the first time, does so twice.
#include "kernel_cache/store/attempt_log.h"

#include <csignal>
#include <thread>

#include "tests/kernel_cache/store_fixture.h"
#include "tests/support/child_process.h"
#include "tests/support/fault_file_layer.h"

namespace eagercache {
namespace {

class AttemptTest : public StoreTest {
 protected:
  std::filesystem::path records() const { return inside(environment() + "/a"); }

  Status publish_object(const std::string& object) {
    return open()
        ->publish(entry_of(1, EntryKind::kKernel),
                  {{ObjectKind::kSharedObject, test_object(object)}})
        .status();
  }

  // What the layer above does with a kernel: 0 when it answered, 1 when there was none to load.
  static int load_and_run(DiskStore& store) {
    const auto found = store.find(key_of(1));
    if (!found || found->kind != EntryKind::kKernel) return 1;
    if (!store.check_attempts(key_of(1))) return 1;
    const auto path = store.verified_shared_object(found.value(), 0);
    if (!path) return 2;
    store.note_attempt(key_of(1), true);
    const auto library = SharedLibrary::open(path.value());
    if (!library) return 3;
    store.note_attempt(key_of(1), false);
    store.note_attempt(key_of(1), true);
    ask(library.value());
    store.note_attempt(key_of(1), false);
    return 0;
  }
  int use_in_a_process() {
    return run_in_child([&] { return load_and_run(*open()); });
  }
};

constexpr int kKilled = 128 + SIGILL;

TEST_F(AttemptTest, AKernelThatKillsItsProcessDoesSoTwice) {
  for (const char* object : {"object_crash_on_load", "object_crash_on_run"}) {
    std::filesystem::remove_all(root());
    ASSERT_TRUE(publish_object(object));
    EXPECT_EQ(use_in_a_process(), kKilled) << object;
    EXPECT_EQ(use_in_a_process(), kKilled) << object;
    EXPECT_EQ(use_in_a_process(), 1) << object;
    EXPECT_EQ(use_in_a_process(), 1) << object;
    const auto store = open();
    const auto found = store->find(key_of(1));
    ASSERT_TRUE(found) << object;
    EXPECT_EQ(found->kind, EntryKind::kFailed);
    EXPECT_EQ(found->failure, FailureClass::kDeterministic);
    EXPECT_NE(found->facts.at("reason").find("2 processes died"), std::string::npos);
    EXPECT_EQ(count_files(records()), 0U);
    EXPECT_EQ(publish_object(object).code(), StatusCode::kOk) << "a new proof may replace it";
  }
}

TEST_F(AttemptTest, AKernelThatWorksIsNeverAccusedHoweverItsProcessEnds) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run_in_child([&] {
                const auto store = open();
                if (load_and_run(*store) != 0) return 1;
                ::raise(SIGKILL);
                return 2;
              }),
              128 + SIGKILL);
  }
  EXPECT_EQ(count_files(records()), 1U) << "each process removes what the last one left";
  EXPECT_EQ(use_in_a_process(), 0);
  EXPECT_EQ(load_and_run(*open()), 0);
  EXPECT_EQ(count_files(records()), 0U);
}

TEST_F(AttemptTest, AnAttemptOfALivingProcessAccusesNobody) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  const auto first = open();
  const auto second = open();
  for (DiskStore* store : {first.get(), second.get()}) {
    ASSERT_TRUE(store->check_attempts(key_of(1)));
    store->note_attempt(key_of(1), true);
  }
  EXPECT_EQ(use_in_a_process(), 0);
  EXPECT_TRUE(first->check_attempts(key_of(1)));
}

TEST_F(AttemptTest, AForkedChildsDeathDoesNotEndOrAccuseItsParentsAttempt) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  const auto store = open();
  ASSERT_TRUE(store->check_attempts(key_of(1)));
  store->note_attempt(key_of(1), true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run_in_child([&] {
                store->note_attempt(key_of(1), true);
                ::raise(SIGKILL);
                return 0;
              }),
              128 + SIGKILL);
  }
  EXPECT_EQ(use_in_a_process(), 0);
  store->note_attempt(key_of(1), false);
}

TEST_F(AttemptTest, OtherKeysOfADeadProcessAreNotAccused) {
  ASSERT_TRUE(publish_object("object_crash_on_run"));
  ASSERT_TRUE(publish_kernel(*open(), 2));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(run_in_child([&] {
                const auto store = open();
                if (!store->check_attempts(key_of(2))) return 1;
                store->note_attempt(key_of(2), true);
                store->note_attempt(key_of(2), false);
                return load_and_run(*store);
              }),
              kKilled);
  }
  EXPECT_TRUE(open()->check_attempts(key_of(2)));
  EXPECT_EQ(use_in_a_process(), 1);
}

TEST_F(AttemptTest, DamagedAndOldRecordsAreNoAccusationAndGo) {
  const auto store = open();
  ASSERT_TRUE(publish_kernel(*store, 1));
  const std::string line = "+" + key_of(1).hex() + "\n";
  const std::string torn = line.substr(0, 40);
  int number = 0;
  for (const std::string& text : {torn, "+nonsense\n" + line, std::string(), torn + line}) {
    TemporaryName owner = new_temporary_name(false);
    owner.process = static_cast<std::uint32_t>(++number);
    write_bytes(inside(attempt_file(environment(), owner)), text);
  }
  EXPECT_TRUE(store->check_attempts(key_of(1)));
  EXPECT_EQ(count_files(records()), 1U) << "our own";
  // One whole accusation stays, for a week.
  write_bytes(inside(attempt_file(environment(), new_temporary_name(false))), line + torn);
  EXPECT_TRUE(store->check_attempts(key_of(1)));
  ASSERT_TRUE(store->evict(false));
  EXPECT_EQ(count_files(records()), 2U);
  FaultFileLayer later;
  later.set_clock_offset(8LL * 24 * 3600);
  StoreOptions cleaning = options();
  cleaning.files = &later;
  EXPECT_GE(open(cleaning)->evict(false)->temporaries_removed, 1U);
  EXPECT_EQ(count_files(records()), 1U);
}

TEST_F(AttemptTest, TheRecordIsMadeAnewAfterTheStoreWasDeleted) {
  const auto store = open();
  ASSERT_TRUE(store->check_attempts(key_of(1)));
  std::filesystem::remove_all(root());
  store->note_attempt(key_of(1), true);
  store->note_attempt(key_of(1), false);
  ASSERT_TRUE(store->check_attempts(key_of(1)));
  EXPECT_EQ(count_files(records()), 1U);
}

TEST_F(AttemptTest, AReadOnlyStoreWritesNoRecord) {
  ASSERT_TRUE(publish_kernel(*open(), 1));
  FaultFileLayer files;
  StoreOptions reading = options();
  reading.read_only = true;
  reading.files = &files;
  EXPECT_EQ(load_and_run(*open(reading)), 0);
  EXPECT_EQ(files.changes(), 0U);
}

TEST_F(AttemptTest, ThreadsNoteWholeLines) {
  const auto store = open();
  ASSERT_TRUE(store->check_attempts(key_of(1)));
  std::vector<std::thread> threads;
  for (std::uint64_t n = 0; n < 8; ++n) {
    threads.emplace_back([&, n] {
      for (int i = 0; i < 100; ++i) {
        store->note_attempt(key_of(n), true);
        store->note_attempt(key_of(n), false);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& entry : std::filesystem::directory_iterator(records())) {
    const std::string text = read_bytes(entry.path());
    EXPECT_EQ(text.size(), 8U * 200 * 66);
    for (std::size_t at = 65; at < text.size(); at += 66) ASSERT_EQ(text[at], '\n');
  }
}

}  // namespace
}  // namespace eagercache
