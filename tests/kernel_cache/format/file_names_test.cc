#include "kernel_cache/format/file_names.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <set>
#include <string>

#include "tests/support/child_process.h"

namespace eagercache {
namespace {

const Digest kDigest = sha256("some content");
const std::string kHex = kDigest.hex();
const std::string kEnvironment = environment_id_of("an environment");

TEST(FileNamesTest, NamesAreThoseOfTheFormat) {
  const std::string fan = kHex.substr(0, 2);
  EXPECT_EQ(environment_id_of("an environment"), sha256("an environment").hex().substr(0, 16));
  EXPECT_EQ(environment_file("0123456789abcdef"), "0123456789abcdef/ENV");
  EXPECT_EQ(manifest_file(kEnvironment, kDigest), kEnvironment + "/m/" + fan + "/" + kHex);
  EXPECT_EQ(failure_file(kEnvironment, kDigest), kEnvironment + "/n/" + kHex);
  EXPECT_EQ(object_file(ObjectKind::kSharedObject, kDigest), "o/" + fan + "/" + kHex + ".so");
  EXPECT_EQ(object_file(ObjectKind::kCubin, kDigest), "o/" + fan + "/" + kHex + ".cubin");
  EXPECT_EQ(lock_file(kDigest), "l/" + fan);
  EXPECT_EQ(temporary_file({0xab, 12, 34, 0xcd, false}), "t/f-000000ab-12-34-00000000000000cd");
  EXPECT_EQ(temporary_file({0xab, 12, 34, 0xcd, true}), "t/d-000000ab-12-34-00000000000000cd");
  EXPECT_EQ(attempt_file(kEnvironment, {0xab, 12, 34, 0xcd, false}),
            kEnvironment + "/a/f-000000ab-12-34-00000000000000cd");
  EXPECT_EQ(quarantine_file(0xcd, "leaf.so"), "q/00000000000000cd-leaf.so");
}

TEST(FileNamesTest, ParsingIsTheInverseOfBuilding) {
  const auto environment = parse_name(kEnvironment);
  ASSERT_TRUE(environment);
  EXPECT_EQ(environment->kind, NameKind::kEnvironment);
  EXPECT_EQ(environment->environment, kEnvironment);

  const auto manifest = parse_name(manifest_file(kEnvironment, kDigest));
  ASSERT_TRUE(manifest);
  EXPECT_EQ(manifest->kind, NameKind::kManifest);
  EXPECT_EQ(manifest->environment, kEnvironment);
  EXPECT_EQ(manifest->digest, kDigest);

  const auto failure = parse_name(failure_file(kEnvironment, kDigest));
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, NameKind::kFailure);
  EXPECT_EQ(failure->digest, kDigest);

  for (const ObjectKind kind : {ObjectKind::kSharedObject, ObjectKind::kCubin}) {
    const auto object = parse_name(object_file(kind, kDigest));
    ASSERT_TRUE(object);
    EXPECT_EQ(object->kind, NameKind::kObject);
    EXPECT_EQ(object->object_kind, kind);
    EXPECT_EQ(object->digest, kDigest);
  }
  for (const bool is_directory : {false, true}) {
    const TemporaryName name = new_temporary_name(is_directory);
    const auto temporary = parse_name(temporary_file(name));
    ASSERT_TRUE(temporary);
    EXPECT_EQ(temporary->kind, NameKind::kTemporary);
    EXPECT_EQ(temporary->temporary, name);
  }
  const TemporaryName owner = new_temporary_name(false);
  const auto attempts = parse_name(attempt_file(kEnvironment, owner));
  ASSERT_TRUE(attempts);
  EXPECT_EQ(attempts->kind, NameKind::kAttempts);
  EXPECT_EQ(attempts->environment, kEnvironment);
  EXPECT_EQ(attempts->temporary, owner);
  EXPECT_EQ(parse_name(lock_file(kDigest))->kind, NameKind::kLock);
  EXPECT_EQ(parse_name(kEvictionLock)->kind, NameKind::kLock);
  EXPECT_EQ(parse_name(quarantine_file(7, "x"))->kind, NameKind::kQuarantined);
}

TEST(FileNamesTest, NamesThatWeNeverBuildAreNotParsed) {
  const std::string fan = kHex.substr(0, 2);
  const std::string other_fan = fan == "00" ? "01" : "00";
  for (const std::string& name :
       std::initializer_list<std::string>{"",
                                          "/",
                                          "o",
                                          "..",
                                          "o/..",
                                          kHex,
                                          kEnvironment + "/",
                                          kEnvironment + "/m/" + kHex,
                                          kEnvironment + "/m/" + other_fan + "/" + kHex,
                                          kEnvironment + "/m/" + fan + "/" + kHex + "0",
                                          kEnvironment + "/m/" + fan + "//" + kHex,
                                          kEnvironment + "/n/" + fan + "/" + kHex,
                                          kEnvironment + "/x/" + fan + "/" + kHex,
                                          "short/m/" + fan + "/" + kHex,
                                          "o/" + fan + "/" + kHex,
                                          "o/" + fan + "/" + kHex + ".dll",
                                          "o/" + other_fan + "/" + kHex + ".so",
                                          "o/" + fan + "/.so",
                                          "l/0",
                                          "l/0G",
                                          "l/000",
                                          "l/evicted",
                                          "t/f-ab-12-34-cd",
                                          "t/f-000000ab-012-34-00000000000000cd",
                                          "t/x-000000ab-12-34-00000000000000cd",
                                          "t/f-000000ab--12-34-00000000000000cd",
                                          "t/f-000000AB-12-34-00000000000000cd",
                                          "t/f-000000ab-12-34-00000000000000cd-1",
                                          kEnvironment + "/a/f-ab-12-34-cd",
                                          "short/a/f-000000ab-12-34-00000000000000cd",
                                          "q/00000000000000cd-",
                                          "q/cd-leaf"}) {
    EXPECT_FALSE(parse_name(name)) << name;
  }
}

TEST(FileNamesTest, TemporaryNamesAreNeverTheSame) {
  std::set<std::string> names;
  for (int i = 0; i < 10'000; ++i) names.insert(temporary_file(new_temporary_name(false)));
  EXPECT_EQ(names.size(), 10'000U);
}

TEST(FileNamesTest, OnlyADeadProcessOfThisMachineIsADeadOwner) {
  TemporaryName name = new_temporary_name(false);
  EXPECT_FALSE(owner_is_dead(name));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  name.process = static_cast<std::uint32_t>(child);
  EXPECT_TRUE(owner_is_dead(name));
  name.machine ^= 1;
  EXPECT_FALSE(owner_is_dead(name));
}

}  // namespace
}  // namespace eagercache
