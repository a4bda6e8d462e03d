// FORMAT.md's worked example is a manifest of this build, byte for byte.
#include <gtest/gtest.h>

#include <string>

#include "kernel_cache/format/file_names.h"
#include "kernel_cache/format/manifest.h"
#include "tests/kernel_cache/test_objects.h"

namespace eagercache {
namespace {

Manifest example() {
  Manifest manifest;
  manifest.key = sha256("an example key");
  manifest.environment = sha256("an example environment");
  manifest.kind = EntryKind::kKernel;
  manifest.created = 1'700'000'000;
  manifest.objects = {{ObjectKind::kSharedObject, sha256("an example object"), 17}};
  manifest.cpu_features = {"avx2", "fma"};
  manifest.facts = {
      {"call", "{\"sizes\": [[8]]}"}, {"op", "aten::abs"}, {"reason", "first\nsecond"}};
  return manifest;
}

std::string document() { return read_bytes(EAGERCACHE_FORMAT_DOCUMENT); }

TEST(FormatDocumentTest, TheWorkedExampleIsWhatTheWriterWrites) {
  const std::string text = document();
  const std::string fence = "```text\n";
  const std::size_t begin = text.find(fence) + fence.size();
  const std::size_t end = text.find("```", begin);
  ASSERT_NE(text.find(fence), std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const std::string shown = text.substr(begin, end - begin);
  EXPECT_EQ(shown, encode_manifest(example()).value());
  const auto decoded = decode_manifest(shown);
  ASSERT_TRUE(decoded) << decoded.status().to_string();
  EXPECT_EQ(decoded.value(), example());
}

TEST(FormatDocumentTest, TheLimitsInTheTextAreThoseOfTheCode) {
  const std::string text = document();
  EXPECT_EQ(kMaxManifestBytes, 65'536U);
  for (const char* phrase : {"at most 65,536 bytes", "1 to 64 objects", "1*64("}) {
    EXPECT_NE(text.find(phrase), std::string::npos) << phrase;
  }
  Manifest manifest = example();
  manifest.objects.assign(64, manifest.objects[0]);
  EXPECT_TRUE(encode_manifest(manifest));
  manifest.objects.push_back(manifest.objects[0]);
  EXPECT_FALSE(encode_manifest(manifest));
  manifest = example();
  manifest.facts[std::string(64, 'a')] = "";
  EXPECT_TRUE(encode_manifest(manifest));
  manifest.facts[std::string(65, 'a')] = "";
  EXPECT_FALSE(encode_manifest(manifest));
}

}  // namespace
}  // namespace eagercache
