#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_cache/base/digest.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// What a manifest's facts say about the kernel in its shared object.
struct KernelForm {
  std::string form;            // "bare", "scalars", "shapes", "cuda", "cuda_scalars",
                               // "cuda_shapes" or "container"
  std::string launch_plan;     // bare, scalars: launch_plan.h; shapes: shape_plan.h; cuda,
                               // cuda_scalars: cuda_plan.h; cuda_shapes: cuda_shape_plan.h
  std::string output_strides;  // container: see ContainerKernel::set_output_strides
};

// What a compiled object says it was made for. A manifest says how an object's functions are
// called, and code that is called otherwise than it was compiled for writes where it should not. So
// the object has a text with a line of 64 hexadecimal digits for each entry that it is of: a digest
// of the entry's key and of all that is said about calling it (calls/contract.py writes it). A
// manifest that says anything else is refused before its object's functions are called.

// The digest of one entry. Of a plan for symbolic sizes its choice, which the object is older than,
// does not count.
Digest contract_of(const Digest& key, const KernelForm& form,
                   const std::vector<std::string>& cpu_features);

// The name of an object's text.
inline constexpr const char* kMadeForSymbol = "eagercache_made_for";

// The text at the address that kMadeForSymbol has in a library; empty for nullptr.
std::string made_for(const void* symbol);

// A cubin has no symbol of ours. Its line stands behind the ELF file, which the driver reads by the
// file's own headers and no further: '\n', kMadeForSymbol, '\n', 64 digits, '\n'. The form in its
// digest is that of the entry, a blank and the cubin's number among the entry's, so that two of one
// entry cannot stand in for each other. The line with its end; empty where there is none.
std::string cubin_made_for(std::string_view cubin);

// A line, with its end.
inline constexpr std::size_t kContractLine = 65;

// kCorrupt unless `text` has the contract's line.
Status check_contract(std::string_view text, const Digest& contract);

}  // namespace eagercache
