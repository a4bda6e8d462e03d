#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace eagercache {

// What the processor says about itself: the registers that hold instruction set bits.
struct CpuRegisters {
  std::uint32_t leaf1_ecx = 0;
  std::uint32_t leaf1_edx = 0;
  std::uint32_t leaf7_ebx = 0;
  std::uint32_t leaf7_ecx = 0;
  std::uint32_t leaf7_edx = 0;
  std::uint32_t leaf7_1_eax = 0;
  std::uint32_t extended1_ecx = 0;
  std::uint64_t xcr0 = 0;  // register state that the kernel saves; 0 without XSAVE
};

// All zero on another processor than x86-64.
CpuRegisters read_cpu_registers() noexcept;

// Names of the features that code may use: present, and their registers enabled by the kernel. The
// names are /proc/cpuinfo's ("avx2", "avx512_bf16", "amx_tile"), but for "sse3" and "lzcnt".
// Sorted.
std::vector<std::string> cpu_features_of(const CpuRegisters& registers);

// What this machine has, asked once: cpu_features_of its registers; on aarch64 what the kernel
// says.
const std::vector<std::string>& host_cpu_features();

// The first of `required` that `available` lacks, or an empty string when it is a superset. A name
// that nobody knows is lacking.
std::string missing_cpu_feature(std::span<const std::string> required,
                                std::span<const std::string> available);

}  // namespace eagercache
