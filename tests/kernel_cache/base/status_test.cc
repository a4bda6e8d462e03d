#include "kernel_cache/base/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>
#include <string>

namespace eagercache {
namespace {

TEST(StatusTest, OkHasNoMessage) {
  const Status status;
  EXPECT_TRUE(status.is_ok());
  EXPECT_EQ(status.to_string(), "ok");
  EXPECT_TRUE(status.message().empty());
}

TEST(StatusTest, ErrnoBecomesACodeAndTheTextNamesActionAndPath) {
  EXPECT_EQ(Status::from_errno(ENOENT, "open", "/a").code(), StatusCode::kNotFound);
  EXPECT_EQ(Status::from_errno(ENOSPC, "write", "/a").code(), StatusCode::kFull);
  EXPECT_EQ(Status::from_errno(EDQUOT, "write", "/a").code(), StatusCode::kFull);
  EXPECT_EQ(Status::from_errno(EACCES, "open", "/a").code(), StatusCode::kDenied);
  EXPECT_EQ(Status::from_errno(EROFS, "open", "/a").code(), StatusCode::kDenied);
  EXPECT_EQ(Status::from_errno(ESTALE, "open", "/a").code(), StatusCode::kIoError);
  EXPECT_EQ(Status::from_errno(EACCES, "open", "/a/b").to_string(),
            "denied: open /a/b: Permission denied");
}

TEST(StatusTest, EveryCodeHasANameOfItsOwn) {
  std::set<std::string> names;
  constexpr int kLast = static_cast<int>(StatusCode::kFull);
  for (int code = 0; code <= kLast; ++code) {
    names.emplace(status_code_name(static_cast<StatusCode>(code)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kLast) + 1);
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(StatusTest, AResultMovesItsValueOut) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  ASSERT_TRUE(result);
  EXPECT_EQ(result.code(), StatusCode::kOk);
  const std::unique_ptr<int> value = std::move(result).value();
  EXPECT_EQ(*value, 7);
}

TEST(StatusTest, AFailedResultHasItsStatus) {
  const Result<int> result(Status(StatusCode::kBusy, "held"));
  EXPECT_FALSE(result);
  EXPECT_EQ(result.status().to_string(), "busy: held");
}

}  // namespace
}  // namespace eagercache
