#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <string>

#include "guards/key/key_fields.h"

// The list of key fields, each of them left out of the key in turn: its own test must fail then.
// The program that is run holds the encoder and the tests of the list, in a build in which fields
// can be left out.
namespace eagercache {
namespace {

// The exit status, or the signal as a shell reports it.
int run(const std::string& mutation, const std::string& filter) {
  const std::string command = "EAGERCACHE_MUTATE='" + mutation +
                              "' '" EAGERCACHE_MUTATED_PROGRAM
                              "' --gtest_brief=1 --gtest_filter='" +
                              filter + "' >/dev/null 2>&1";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class EachFieldLeftOut : public ::testing::TestWithParam<KeyFieldInfo> {};

TEST_P(EachFieldLeftOut, FailsItsTest) {
  EXPECT_NE(run(std::string("field.") + GetParam().name,
                std::string("KeyFields/EveryKeyField.*/") + GetParam().name),
            0);
}

INSTANTIATE_TEST_SUITE_P(KeyFields, EachFieldLeftOut, ::testing::ValuesIn(kKeyFields),
                         [](const ::testing::TestParamInfo<KeyFieldInfo>& field) {
                           return field.param.name;
                         });

TEST(MutatedProgram, PassesWithEveryFieldInPlace) { EXPECT_EQ(run("", "*"), 0); }

}  // namespace
}  // namespace eagercache
