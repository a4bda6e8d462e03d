#include "dispatcher/plans/contract.h"

#include <gtest/gtest.h>

#include <string>

namespace eagercache {
namespace {

const std::string kLine = std::string(64, 'a') + "\n";
const std::string kTail = "\neagercache_made_for\n" + kLine;

TEST(Contract, ACubinHasItsLineBehindTheFile) {
  EXPECT_EQ(cubin_made_for("\x7f"
                           "ELF and more" +
                           kTail),
            kLine);
  EXPECT_EQ(cubin_made_for(kTail), kLine);
}

TEST(Contract, ACubinWithoutALineAtItsEndSaysNothing) {
  for (const std::string& cubin : {std::string(), std::string("ELF"), kLine, kTail + "more",
                                   "more" + kTail.substr(1), kTail.substr(0, 80)}) {
    EXPECT_EQ(cubin_made_for(cubin), "") << cubin;
  }
}

TEST(Contract, ALineIsFoundWhereAnyOfThemIsIt) {
  const Digest first = contract_of(sha256("key"), {"cuda 0", "plan", ""}, {});
  const Digest second = contract_of(sha256("key"), {"cuda 1", "plan", ""}, {});
  const std::string text = first.hex() + "\n" + second.hex() + "\n";
  EXPECT_TRUE(check_contract(text, first));
  EXPECT_TRUE(check_contract(text, second));
  EXPECT_EQ(check_contract(first.hex() + "\n", second).code(), StatusCode::kCorrupt);
  EXPECT_EQ(check_contract("", first).code(), StatusCode::kCorrupt);
  EXPECT_EQ(check_contract(std::string(65, '\n'), first).code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace eagercache
