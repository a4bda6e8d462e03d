// Lists of what is revoked.

#include "kernel_cache/format/revocations.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "kernel_cache/base/digest.h"
#include "tests/kernel_cache/test_objects.h"
#include "tests/support/temporary_directory.h"

namespace eagercache {
namespace {

TEST(RevocationsTest, AListThatCannotBeReadOrUnderstoodIsNoEmptyOne) {
  const TemporaryDirectory directory;
  const auto at = [&](const char* name) { return directory.path() / name; };
  EXPECT_EQ(Revocations::read(at("nothing")).code(), StatusCode::kRefused);
  EXPECT_EQ(Revocations::read(directory.path()).code(), StatusCode::kRefused);
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  EXPECT_EQ(Revocations::read(at("pipe")).code(), StatusCode::kRefused);
  const Digest digest = sha256("one");
  const std::string id = digest.hex();
  for (const std::string& text : {id.substr(1), id + "0", "x" + id.substr(1), "key " + id}) {
    write_bytes(at("list"), "\n" + text + "\n");
    const Result<Revocations> list = Revocations::read(at("list"));
    EXPECT_EQ(list.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(list.status().message().find("line 2"), std::string::npos);
  }
  write_bytes(at("list"), "  " + id + "\ta note\n# " + id.substr(3));
  EXPECT_TRUE(Revocations::read(at("list"))->contains(digest.bytes));
  write_bytes(at("list"), "");
  EXPECT_TRUE(Revocations::read(at("list"))->empty());
}

}  // namespace
}  // namespace eagercache
