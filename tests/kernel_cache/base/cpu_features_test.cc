#include "kernel_cache/base/cpu_features.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace eagercache {
namespace {

CpuRegisters everything() {
  CpuRegisters registers;
  registers.leaf1_ecx = registers.leaf1_edx = registers.leaf7_ebx = registers.leaf7_ecx = ~0U;
  registers.leaf7_edx = registers.leaf7_1_eax = registers.extended1_ecx = ~0U;
  registers.xcr0 = ~std::uint64_t{0};
  return registers;
}

bool has(const std::vector<std::string>& features, const std::string& name) {
  return std::find(features.begin(), features.end(), name) != features.end();
}

TEST(CpuFeaturesTest, NothingIsClaimedOfAnEmptyProcessor) {
  EXPECT_TRUE(cpu_features_of(CpuRegisters{}).empty());
}

TEST(CpuFeaturesTest, RegistersThatTheKernelDoesNotSaveTakeTheirFeaturesAway) {
  CpuRegisters registers = everything();
  EXPECT_TRUE(has(cpu_features_of(registers), "amx_tile"));
  registers.xcr0 = 0xe7;  // AVX-512, no AMX
  EXPECT_FALSE(has(cpu_features_of(registers), "amx_tile"));
  EXPECT_TRUE(has(cpu_features_of(registers), "avx512_bf16"));
  registers.xcr0 = 0x7;  // AVX only
  EXPECT_FALSE(has(cpu_features_of(registers), "avx512f"));
  EXPECT_FALSE(has(cpu_features_of(registers), "avx512_bf16"));
  EXPECT_TRUE(has(cpu_features_of(registers), "avx2"));
  registers.xcr0 = 0x3;  // SSE only
  for (const char* name : {"avx", "avx2", "fma", "f16c", "avx_vnni"}) {
    EXPECT_FALSE(has(cpu_features_of(registers), name)) << name;
  }
  EXPECT_TRUE(has(cpu_features_of(registers), "sse4_2"));
}

TEST(CpuFeaturesTest, RequirementsAreASubsetTestAndUnknownNamesAreMissing) {
  const std::vector<std::string> host{"avx", "avx2", "fma"};
  const auto missing = [&](std::vector<std::string> required) {
    return missing_cpu_feature(required, host);
  };
  EXPECT_EQ(missing({}), "");
  EXPECT_EQ(missing({"fma", "avx"}), "");
  EXPECT_EQ(missing({"fma", "avx512f"}), "avx512f");
  EXPECT_EQ(missing({"avx1024"}), "avx1024");
}

// The kernel's list is the oracle, where this machine shows one.
TEST(CpuFeaturesTest, TheHostsFeaturesAreThoseOfProcCpuinfo) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) {
  }
  ASSERT_TRUE(line.starts_with("flags")) << "no flags in /proc/cpuinfo";
  std::istringstream words(line.substr(line.find(':') + 1));
  std::set<std::string> kernel;
  for (std::string word; words >> word;) kernel.insert(word);
  if (kernel.erase("pni") == 1) kernel.insert("sse3");
  if (kernel.erase("abm") == 1) kernel.insert("lzcnt");

  const std::vector<std::string>& host = host_cpu_features();
  EXPECT_TRUE(has(host, "sse2"));
  // Names that kernels before 6.2 do not print.
  const std::set<std::string> recent{"amx_bf16", "amx_fp16", "amx_int8",   "amx_tile",
                                     "avx_ifma", "avx_vnni", "avx512_fp16"};
  for (const std::string& name : cpu_features_of(everything())) {
    if (recent.contains(name) && !kernel.contains(name)) continue;
    EXPECT_EQ(has(host, name), kernel.contains(name)) << name;
  }
}

}  // namespace
}  // namespace eagercache
