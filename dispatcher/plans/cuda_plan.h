#pragma once

// Plain data, made from a manifest's text when its kernel is loaded, and owned by the kernel.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dispatcher/plans/launch_plan.h"
#include "kernel_cache/base/status.h"

namespace eagercache {

// How to launch the kernels of one call on CUDA: what the hook allocates, and the launches in
// order. Pointers are numbered: the call's tensors in argument order, the outputs, the scratch
// buffers.
struct CudaPlan {
  struct Argument {
    enum class Kind : std::uint8_t {
      kPointer,  // `index` numbers it; `value` is an offset in bytes
      kInput,    // the number in the 0-dim CPU tensor that is input `index`, as `type`
      kValue,    // `value` holds the bits of a `type`
      kNull,     // a null pointer
    };
    enum class Type : std::uint8_t { kInt32, kInt64, kFloat32, kFloat64 };
    Kind kind = Kind::kNull;
    Type type = Type::kInt64;
    std::uint16_t index = 0;
    std::uint64_t value = 0;
  };

  struct Launch {
    std::size_t object = 0;  // index of the cubin among the entry's objects
    std::string function;
    std::array<std::uint32_t, 3> grid{};
    std::uint32_t threads = 0;  // of a block
    std::uint32_t shared = 0;   // bytes of dynamic shared memory
    std::vector<Argument> arguments;
  };

  // An optimizer's step over a model is a call on lists of hundreds of tensors.
  static constexpr std::size_t kMaxInputs = 1024;  // as many as a call may have
  static constexpr std::size_t kMaxOutputs = 1024;
  static constexpr std::size_t kMaxScratch = 1024;
  static constexpr std::size_t kMaxPointers = kMaxInputs + kMaxOutputs + kMaxScratch;
  static constexpr std::size_t kMaxLaunches = 1024;
  static constexpr std::size_t kMaxObjects = 1024;
  static constexpr std::size_t kMaxArguments = 512;  // 4 KB, which every architecture takes

  std::size_t num_inputs = 0;
  std::vector<std::size_t> writes;          // the inputs that are written; ascending
  std::vector<LaunchPlan::Output> outputs;  // none only where it writes
  std::vector<std::uint64_t> scratch;       // bytes of each buffer
  std::vector<Launch> launches;
  std::size_t num_objects = 0;  // cubins that the launches name
};

// The plan that a manifest's text stands for. kCorrupt for anything but canonical JSON (sorted
// keys, no spaces) of exactly the known fields, with every number in range; kIncompatible for
// another version.
Result<CudaPlan> parse_cuda_plan(std::string_view text);

}  // namespace eagercache
