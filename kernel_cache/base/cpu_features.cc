#include "kernel_cache/base/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#else
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <array>

namespace eagercache {
namespace {

// Register state that the kernel must have enabled in XCR0 (Intel SDM volume 1, section 13.1).
constexpr std::uint64_t kNone = 0;
constexpr std::uint64_t kAvxState = 0x6;      // SSE and AVX
constexpr std::uint64_t kAvx512State = 0xe6;  // and opmask, upper ZMM, high ZMM
constexpr std::uint64_t kAmxState = 0x60000;  // tile configuration and data

struct Feature {
  const char* name;
  std::uint32_t CpuRegisters::*word;
  unsigned int bit;
  std::uint64_t state;
};

constexpr auto kLeaf1Ecx = &CpuRegisters::leaf1_ecx;
constexpr auto kLeaf1Edx = &CpuRegisters::leaf1_edx;
constexpr auto kLeaf7Ebx = &CpuRegisters::leaf7_ebx;
constexpr auto kLeaf7Ecx = &CpuRegisters::leaf7_ecx;
constexpr auto kLeaf7Edx = &CpuRegisters::leaf7_edx;
constexpr auto kLeaf71Eax = &CpuRegisters::leaf7_1_eax;
constexpr auto kExtended = &CpuRegisters::extended1_ecx;

constexpr std::array kFeatures{
    Feature{"sse", kLeaf1Edx, 25, kNone},
    Feature{"sse2", kLeaf1Edx, 26, kNone},
    Feature{"sse3", kLeaf1Ecx, 0, kNone},
    Feature{"pclmulqdq", kLeaf1Ecx, 1, kNone},
    Feature{"ssse3", kLeaf1Ecx, 9, kNone},
    Feature{"fma", kLeaf1Ecx, 12, kAvxState},
    Feature{"sse4_1", kLeaf1Ecx, 19, kNone},
    Feature{"sse4_2", kLeaf1Ecx, 20, kNone},
    Feature{"movbe", kLeaf1Ecx, 22, kNone},
    Feature{"popcnt", kLeaf1Ecx, 23, kNone},
    Feature{"aes", kLeaf1Ecx, 25, kNone},
    Feature{"avx", kLeaf1Ecx, 28, kAvxState},
    Feature{"f16c", kLeaf1Ecx, 29, kAvxState},
    Feature{"lzcnt", kExtended, 5, kNone},
    Feature{"bmi1", kLeaf7Ebx, 3, kNone},
    Feature{"avx2", kLeaf7Ebx, 5, kAvxState},
    Feature{"bmi2", kLeaf7Ebx, 8, kNone},
    Feature{"avx512f", kLeaf7Ebx, 16, kAvx512State},
    Feature{"avx512dq", kLeaf7Ebx, 17, kAvx512State},
    Feature{"adx", kLeaf7Ebx, 19, kNone},
    Feature{"avx512ifma", kLeaf7Ebx, 21, kAvx512State},
    Feature{"avx512cd", kLeaf7Ebx, 28, kAvx512State},
    Feature{"avx512bw", kLeaf7Ebx, 30, kAvx512State},
    Feature{"avx512vl", kLeaf7Ebx, 31, kAvx512State},
    Feature{"avx512vbmi", kLeaf7Ecx, 1, kAvx512State},
    Feature{"avx512_vbmi2", kLeaf7Ecx, 6, kAvx512State},
    Feature{"gfni", kLeaf7Ecx, 8, kNone},
    Feature{"vaes", kLeaf7Ecx, 9, kAvxState},
    Feature{"vpclmulqdq", kLeaf7Ecx, 10, kAvxState},
    Feature{"avx512_vnni", kLeaf7Ecx, 11, kAvx512State},
    Feature{"avx512_bitalg", kLeaf7Ecx, 12, kAvx512State},
    Feature{"avx512_vpopcntdq", kLeaf7Ecx, 14, kAvx512State},
    Feature{"avx512_vp2intersect", kLeaf7Edx, 8, kAvx512State},
    Feature{"amx_bf16", kLeaf7Edx, 22, kAmxState},
    Feature{"avx512_fp16", kLeaf7Edx, 23, kAvx512State},
    Feature{"amx_tile", kLeaf7Edx, 24, kAmxState},
    Feature{"amx_int8", kLeaf7Edx, 25, kAmxState},
    Feature{"avx_vnni", kLeaf71Eax, 4, kAvxState},
    Feature{"avx512_bf16", kLeaf71Eax, 5, kAvx512State},
    Feature{"amx_fp16", kLeaf71Eax, 21, kAmxState},
    Feature{"avx_ifma", kLeaf71Eax, 23, kAvxState},
};

#if defined(__x86_64__)
std::uint64_t read_xcr0() noexcept {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<std::uint64_t>(high) << 32 | low;
}
#endif

}  // namespace

#if defined(__x86_64__)
CpuRegisters read_cpu_registers() noexcept {
  constexpr std::uint32_t kXsaveEnabled = 1U << 27;
  CpuRegisters registers;
  std::uint32_t eax = 0;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0) {
    registers.leaf1_ecx = ecx;
    registers.leaf1_edx = edx;
    if ((ecx & kXsaveEnabled) != 0) registers.xcr0 = read_xcr0();
  }
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0) {
    const std::uint32_t last_subleaf = eax;
    registers.leaf7_ebx = ebx;
    registers.leaf7_ecx = ecx;
    registers.leaf7_edx = edx;
    if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
      registers.leaf7_1_eax = eax;
    }
  }
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) != 0) registers.extended1_ecx = ecx;
  return registers;
}

std::vector<std::string> read_cpu_features() { return cpu_features_of(read_cpu_registers()); }
#else
CpuRegisters read_cpu_registers() noexcept { return {}; }

// As /proc/cpuinfo names them, too; sorted. The bits are the kernel's, which promises them.
std::vector<std::string> read_cpu_features() {
  struct Bit {
    const char* name;
    unsigned long word;
    unsigned int bit;
  };
  constexpr std::array kBits{
      Bit{"asimd", AT_HWCAP, 1},   Bit{"asimddp", AT_HWCAP, 20}, Bit{"asimdhp", AT_HWCAP, 10},
      Bit{"atomics", AT_HWCAP, 8}, Bit{"bf16", AT_HWCAP2, 14},   Bit{"fphp", AT_HWCAP, 9},
      Bit{"i8mm", AT_HWCAP2, 13},  Bit{"sve", AT_HWCAP, 22},     Bit{"sve2", AT_HWCAP2, 1}};
  std::vector<std::string> names;
  for (const Bit& bit : kBits) {
    if ((::getauxval(bit.word) >> bit.bit & 1) != 0) names.emplace_back(bit.name);
  }
  return names;
}
#endif

std::vector<std::string> cpu_features_of(const CpuRegisters& registers) {
  std::vector<std::string> names;
  for (const Feature& feature : kFeatures) {
    const bool present = (registers.*feature.word >> feature.bit & 1) != 0;
    if (present && (registers.xcr0 & feature.state) == feature.state) {
      names.emplace_back(feature.name);
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

const std::vector<std::string>& host_cpu_features() {
  // Leaked: asked from threads that outlive static destructors.
  static const auto* const features = new std::vector<std::string>(read_cpu_features());
  return *features;
}

std::string missing_cpu_feature(std::span<const std::string> required,
                                std::span<const std::string> available) {
  for (const std::string& name : required) {
    if (std::find(available.begin(), available.end(), name) == available.end()) return name;
  }
  return {};
}

}  // namespace eagercache
